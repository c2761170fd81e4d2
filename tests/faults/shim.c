/* Faults of a disk and of a clock for one program, by LD_PRELOAD: `nemesis.py` builds it and holds the other end.

   POSTROOM_SHIM names a file that both map, and through which each run decides, while the program runs:
     - each write, sync, truncation, creation, renaming and removal below `directory` is counted, and the one (or each
       from the one) with the number `at` is struck: the program is killed before it or half-way, or told EIO or ENOSPC;
     - where `record` names a file, each is written down there, so that a power cut can be made of it;
     - the wall clock is `clock_offset` nanoseconds off.
   SQLite's shared memory (-shm) is no file that survives anything: it is left out. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { KILL_BEFORE = 1, KILL_HALFWAY = 2, GIVE_EIO = 3, GIVE_ENOSPC = 4, FULL = 5 };
enum { FILES = 4096, TEXT = 512 };

struct control { /* as nemesis.py has it */
  int64_t seen, at, action, for_ever, struck, clock_offset;
  char directory[TEXT], record[TEXT];
};

struct entry { /* of the record: then the first path, the second path, the bytes */
  char kind;   /* W write, S sync, T truncate, C create, R rename, U unlink */
  char pad[3];
  uint32_t first, second;
  int64_t offset, length;
};

static struct control *control;
static char *paths[FILES]; /* of the watched files that are open, by descriptor */
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("POSTROOM_SHIM");
  int fd = file ? open(file, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (found != MAP_FAILED) control = found;
}

static int watched(const char *path) {
  if (!control || !control->directory[0] || !path) return 0;
  size_t length = strlen(path), prefix = strlen(control->directory);
  if (strncmp(path, control->directory, prefix) || (path[prefix] && path[prefix] != '/')) return 0;
  return length < 4 || strcmp(path + length - 4, "-shm");
}

static const char *watched_file(int fd) { return control && fd >= 0 && fd < FILES ? paths[fd] : NULL; }

static void note(char kind, const char *first, const char *second, int64_t offset, const void *data, int64_t length) {
  static int (*open_file)(const char *, int, ...);
  static ssize_t (*write_all)(int, const struct iovec *, int);
  if (!control->record[0]) return;
  if (!open_file) open_file = dlsym(RTLD_NEXT, "open64");
  if (!write_all) write_all = dlsym(RTLD_NEXT, "writev");
  int fd = open_file(control->record, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  struct entry entry = {kind, {0}, strlen(first), second ? strlen(second) : 0, offset, length};
  struct iovec parts[] = {{&entry, sizeof entry},
                          {(void *)first, entry.first},
                          {(void *)(second ? second : ""), entry.second},
                          {(void *)(data ? data : ""), data ? (size_t)length : 0}};
  if (fd < 0 || write_all(fd, parts, 4) < 0) abort(); /* a record with a gap would prove nothing */
  close(fd);
}

/* Count an operation. Returns 0 to go on, 1 to be killed after half of it, or the error to give. A full disk still
   syncs, renames and removes: it refuses what `needs_space`. */
static int strike(int needs_space) {
  int64_t number = __atomic_add_fetch(&control->seen, 1, __ATOMIC_SEQ_CST), at = control->at;
  if (!at || number < at || (number > at && !control->for_ever)) return 0;
  if (control->action == FULL && !needs_space) return 0;
  __atomic_add_fetch(&control->struck, 1, __ATOMIC_SEQ_CST);
  switch (control->action) {
    case KILL_BEFORE: kill(getpid(), SIGKILL); pause(); return 0;
    case KILL_HALFWAY: return 1;
    case GIVE_EIO: return EIO;
    default: return ENOSPC;
  }
}

static void die(void) { kill(getpid(), SIGKILL); pause(); }

#define STRUCK(needs_space, half) \
  do { \
    int verdict = strike(needs_space); \
    if (verdict == 1) { half; die(); } \
    if (verdict) { pthread_mutex_unlock(&order); errno = verdict; return -1; } \
  } while (0)

static ssize_t at_offset(int fd, const void *data, size_t length, off64_t offset) {
  REAL(pwrite64);
  return real(fd, data, length, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) {
  const char *path = watched_file(fd);
  if (!path) return at_offset(fd, data, length, offset);
  pthread_mutex_lock(&order);
  STRUCK(1, at_offset(fd, data, length / 2, offset));
  note('W', path, NULL, offset, data, length);
  ssize_t written = at_offset(fd, data, length, offset);
  pthread_mutex_unlock(&order);
  return written;
}
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return pwrite64(fd, data, length, offset); }

ssize_t write(int fd, const void *data, size_t length) {
  REAL(write);
  const char *path = watched_file(fd);
  if (!path) return real(fd, data, length);
  pthread_mutex_lock(&order);
  STRUCK(1, real(fd, data, length / 2));
  off64_t offset = fcntl(fd, F_GETFL) & O_APPEND ? lseek64(fd, 0, SEEK_END) : lseek64(fd, 0, SEEK_CUR);
  note('W', path, NULL, offset, data, length);
  ssize_t written = real(fd, data, length);
  pthread_mutex_unlock(&order);
  return written;
}

static int sync_with(int (*real)(int), int fd) {
  char link[32], found[PATH_MAX];
  const char *path = watched_file(fd);
  if (!control) return real(fd);
  if (!path) { /* a directory: it was opened without O_CREAT */
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, found, sizeof found - 1);
    if (length < 0) return real(fd);
    found[length] = 0;
    if (!watched(found)) return real(fd);
    path = found;
  }
  pthread_mutex_lock(&order);
  STRUCK(0, (void)0);
  int done = real(fd);
  if (!done) note('S', path, NULL, 0, NULL, 0);
  pthread_mutex_unlock(&order);
  return done;
}
int fsync(int fd) { REAL(fsync); return sync_with(real, fd); }
int fdatasync(int fd) { REAL(fdatasync); return sync_with(real, fd); }

int ftruncate64(int fd, off64_t length) {
  REAL(ftruncate64);
  const char *path = watched_file(fd);
  if (!path) return real(fd, length);
  pthread_mutex_lock(&order);
  STRUCK(0, (void)0);
  note('T', path, NULL, length, NULL, 0);
  int done = real(fd, length);
  pthread_mutex_unlock(&order);
  return done;
}
int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

static int opened(int fd, const char *path) {
  if (fd >= 0 && fd < FILES) {
    free(paths[fd]);
    paths[fd] = watched(path) ? strdup(path) : NULL;
  }
  return fd;
}

static int open_with(const char *path, int flags, mode_t mode) {
  static int (*real)(const char *, int, ...);
  struct stat status;
  if (!real) real = dlsym(RTLD_NEXT, "open64");
  if (!control || !watched(path) || !(flags & (O_CREAT | O_TRUNC)) || flags & O_DIRECTORY)
    return control ? opened(real(path, flags, mode), path) : real(path, flags, mode);
  int there = !stat(path, &status), news = (flags & O_CREAT && !there) || (flags & O_TRUNC && there);
  pthread_mutex_lock(&order);
  if (news) STRUCK(1, (void)0);
  int fd = real(path, flags, mode);
  if (fd >= 0 && !there) note('C', path, NULL, 0, NULL, 0);
  if (fd >= 0 && there && flags & O_TRUNC) note('T', path, NULL, 0, NULL, 0);
  pthread_mutex_unlock(&order);
  return opened(fd, path);
}

#define MODE \
  mode_t mode = 0; \
  if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open64(const char *path, int flags, ...) { MODE return open_with(path, flags, mode); }
int open(const char *path, int flags, ...) { MODE return open_with(path, flags, mode); }
int openat64(int directory, const char *path, int flags, ...) {
  static int (*real)(int, const char *, int, ...);
  MODE
  if (!real) real = dlsym(RTLD_NEXT, "openat64");
  if (directory == AT_FDCWD || path[0] == '/') return open_with(path, flags, mode);
  return real(directory, path, flags, mode);
}

int close(int fd) {
  REAL(close);
  if (watched_file(fd)) {
    free(paths[fd]);
    paths[fd] = NULL;
  }
  return real(fd);
}

int rename(const char *from, const char *to) {
  REAL(rename);
  if (!watched(from)) return real(from, to);
  pthread_mutex_lock(&order);
  STRUCK(0, (void)0);
  int done = real(from, to);
  if (!done) note('R', from, to, 0, NULL, 0);
  for (int fd = 0; fd < FILES; fd++)
    if (!done && paths[fd] && !strcmp(paths[fd], from)) { free(paths[fd]); paths[fd] = strdup(to); }
  pthread_mutex_unlock(&order);
  return done;
}

int unlink(const char *path) {
  REAL(unlink);
  if (!watched(path) || access(path, F_OK)) return real(path);
  pthread_mutex_lock(&order);
  STRUCK(0, (void)0);
  int done = real(path);
  if (!done) note('U', path, NULL, 0, NULL, 0);
  pthread_mutex_unlock(&order);
  return done;
}

/* The wall clock */

static int64_t nanoseconds(void) {
  static int (*real)(clockid_t, struct timespec *);
  struct timespec now;
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  real(CLOCK_REALTIME, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec + (control ? control->clock_offset : 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  REAL(clock_gettime);
  if (!control || !control->clock_offset || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
    return real(clock, now);
  int64_t shown = nanoseconds();
  *now = (struct timespec){shown / 1000000000LL, shown % 1000000000LL};
  return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  int64_t shown = nanoseconds();
  *now = (struct timeval){shown / 1000000000LL, shown % 1000000000LL / 1000};
  return 0;
}

time_t time(time_t *seconds) {
  time_t shown = nanoseconds() / 1000000000LL;
  if (seconds) *seconds = shown;
  return shown;
}
