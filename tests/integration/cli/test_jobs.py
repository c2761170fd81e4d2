"""`postroom jobs`: an operator starts, sees, ends and revives jobs in a real Postgres, as they would type it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from support.databases import ending_session, migrated_database
from support.ledgers import LEASE, Jobs
from support.operated import operated_broker
from support.terminal import Terminal

from broker.database import migrate
from embedded import EmbeddedPostgres
from postroom.ledger.engine import set_aside
from postroom.ledger.primitives import Answer, Child, enter_leg2, fail_activity, spawn

FLOW = """
from postroom.flow import Flow

flow = Flow("nightly-export")

@flow.activity(sends="queue:extract")
async def extract(ctx, request):
    return request

@extract.answered
async def _(ctx, answer):
    return None

quorum = Flow("quorum", threshold=2)

@quorum.activity
async def ask(ctx, request):
    return None

unfinished = Flow("unfinished")
"""
NAME = "flow_of_the_operators"
REFUSED = (
    "UPDATE postroom.outbox_events SET publish_attempts = 1, publish_error = 'maximum payload exceeded'"
    " WHERE id IN (SELECT request.id FROM ledger.request JOIN ledger.activity ON activity.id = activity_id"
    " WHERE job_id = $1)"
)
SPAWNED = "SELECT id FROM postroom.outbox_events WHERE aggregate_id = $1 AND event_type = 'activity_spawned'"


class Office:
    """A database of jobs, and an operator at a terminal."""

    def __init__(self, url: str, reach: dict[str, str]) -> None:
        self.url = url
        self.user = Terminal(**reach | {"POSTROOM_MESH": "sea"})

    def work(self, work: Callable[[Jobs], Awaitable[Any]]) -> Any:
        """Do something to the jobs, as a worker would."""

        async def run() -> Any:
            connection = await asyncpg.connect(self.url)
            try:
                return await work(Jobs(connection))
            finally:
                await connection.close()

        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(run())

    def running(self, *children: Child) -> Any:
        """Begin a job with children of its root: two, where none are named."""

        async def work(jobs: Jobs) -> UUID:
            begun = await jobs.asked()
            root = await jobs.enter(begun.root)
            await spawn(jobs.connection, root, children or [Child(uuid4(), "load"), Child(uuid4(), "count")])
            return begun.job

        return self.work(work)

    def failed(self) -> Any:
        """Let the root of a job have failed."""

        async def work(jobs: Jobs) -> UUID:
            begun = await jobs.asked()
            await jobs.enter(begun.root)
            await fail_activity(jobs.connection, begun.root, "the disk\nis full")
            return begun.job

        return self.work(work)

    def state(self, job: UUID | str) -> str:
        (shown,) = self.user.run("jobs", "show", str(job), "--json").json
        return str(shown["job"]["state"])


@pytest.fixture(scope="module")
def reached(postgres_server: EmbeddedPostgres, session_directory: Path) -> Iterator[Office]:
    """A broker on that database, which knows the mesh."""
    url = migrated_database(postgres_server, "jobs_of_the_command_line", migrate)
    (session_directory / "jobs").mkdir()
    with operated_broker(session_directory / "jobs", url) as reach:
        office = Office(url, reach)
        for mesh in ("sea", "land"):
            assert office.user.run("mesh", "create", mesh).code == 0
        yield office


@pytest.fixture
def office(reached: Office) -> Office:
    return Office(reached.url, {name: text for name, text in reached.user.environment.items() if "POSTROOM" in name})


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A flow in a file of the current directory."""
    (tmp_path / f"{NAME}.py").write_text(FLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield f"{NAME}:flow"
    sys.modules.pop(NAME, None)


def test_a_start_prints_the_job_and_a_repeated_one_says_so(office: Office, flow: str) -> None:
    job = str(uuid4())
    first = office.user.run("jobs", "start", flow, "--job", job, "--request", '{"day": 1}')
    assert (first.code, first.out, first.err) == (0, f"{job}\n", "started a job of nightly-export\n")
    again = office.user.run("jobs", "start", flow, "--job", job, "--request", '{"day":1}')
    assert (again.code, again.out) == (0, f"{job}\n")
    assert "nothing was done" in again.err
    assert office.state(UUID(job)) == "running"


def test_a_start_says_the_trace_of_the_job_and_the_flow_says_its_threshold(office: Office, flow: str) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    (started,) = office.user.run("jobs", "start", f"{NAME}:quorum", "--traceparent", trace, "--json").json
    query = "SELECT threshold, traceparent FROM ledger.job JOIN ledger.activity ON job_id = job.id WHERE job.id = $1"
    row = office.work(lambda jobs: jobs.connection.fetchrow(query, UUID(started["id"])))
    assert tuple(row) == (2, trace)
    refused = office.user.run("jobs", "start", flow, "--traceparent", "nonsense")
    assert (refused.code, "W3C Trace Context" in refused.err) == (2, True)


def test_a_start_by_names_needs_no_code_of_the_flow(office: Office) -> None:
    (started,) = office.user.run("jobs", "start", "elsewhere", "--first", "extract", "--threshold", "1", "--json").json
    assert (started["flow"], started["started"]) == ("elsewhere", True)
    query = "SELECT threshold, name FROM ledger.job JOIN ledger.activity ON job_id = job.id WHERE job.id = $1"
    row = office.work(lambda jobs: jobs.connection.fetchrow(query, UUID(started["id"])))
    assert tuple(row) == (1, "extract")


@pytest.mark.parametrize(("flow", "why"), [("spark-write", "writes of Spark"), ("a" * 60, "at most 58")])
def test_a_start_of_what_no_worker_can_run_is_refused(office: Office, flow: str, why: str) -> None:
    refused = office.user.run("jobs", "start", flow, "--first", "write")
    assert (refused.code, why in refused.err, refused.out) == (2, True, ""), refused
    assert not office.user.run("jobs", "list", "--flow", flow, "--json").json


def test_a_start_mints_an_id_and_reads_the_request_from_a_pipe(office: Office, flow: str) -> None:
    (started,) = office.user.run("jobs", "start", flow, "--request", "-", "--json", stdin='{"day": 2}').json
    assert (started["flow"], started["mesh"], started["started"]) == ("nightly-export", "sea", True)
    (drawn,) = office.user.run("jobs", "tree", started["id"], "--json").json
    assert (drawn["name"], drawn["state"], drawn["ledger"]) == ("extract", "waiting", "000000000000000")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["start", "nonsense"], 2, "does not name a flow"),
        (["start", "no_such_module:flow"], 78, "cannot import no_such_module"),
        (["start", f"{NAME}:nothing"], 78, "there is no nothing in"),
        (["start", f"{NAME}:unfinished"], 78, "has no activity"),
        (["start", f"{NAME}:flow", "--request", "{"], 2, "the request is not JSON"),
        (["start", f"{NAME}:flow", "--request", "[" * 100_000], 2, "the request is nested too deeply"),
        (["start", f"{NAME}:flow", "--request", '"\\ud800"'], 2, r"\ud800 is half of a surrogate pair"),
        (["start", f"{NAME}:flow", "--request", '{"day": 1, "day": 2}'], 2, "the key 'day' is given twice"),
        (["start", f"{NAME}:flow", "--request", '"\\u0000"'], 2, r"(\u0000 cannot be converted to text)"),
        (["start", f"{NAME}:flow", "--mesh", "nowhere"], 3, "there is no mesh 'nowhere'"),
        (["start", "No Such", "--first", "extract"], 2, "flow"),
        (["start", f"{NAME}:flow", "--mesh", "No Such"], 2, "'No Such' is not a mesh's name"),
        (["start", f"{NAME}:flow", "--job", "seven"], 2, "'seven' is not a UUID"),
        (["start", f"{NAME}:flow", "--threshold", "2"], 2, "--threshold needs --first"),
        (["show", "seven"], 2, "'seven' is not a UUID"),
        (["cancel", "seven", "--reason", "x", "--yes"], 2, "'seven' is not a UUID"),
        (["show", str(UUID(int=7))], 3, "postroom jobs list"),
        (["tree", str(UUID(int=7))], 3, "there is no job"),
        (["cancel", str(UUID(int=7)), "--reason", "x", "--yes"], 3, "there is no job"),
        (["retry", str(UUID(int=7)), "--reason", "x", "--yes"], 3, "there is no job"),
        (["retry"], 2, "name at least one job"),
        (["retry", str(UUID(int=7)), "--all"], 2, "give the ids or --all, not both"),
        (["cancel", str(UUID(int=7)), "--yes"], 2, "--reason"),
        (["cancel", str(UUID(int=7)), "--reason", "x"], 3, "there is no job"),
        (["list", "--state", "odd"], 2, "'odd' is not a state: running, closed"),
        (["list", "--mesh", "nowhere"], 3, "there is no mesh 'nowhere'"),
        (["retry", "--all", "--mesh", "nowhere", "--dry-run"], 3, "there is no mesh 'nowhere'"),
        (["explain", "1"], 2, "write 15 digits"),
        (["explain", "001000000000001"], 2, "leg 2 was entered, but leg 1 is not complete"),
        (["explain", "m-7"], 3, "the ledgers know no message and no activity 'm-7'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    office: Office, flow: str, arguments: list[str], code: int, said: str
) -> None:
    del flow  # it only has to be there
    outcome = office.user.run("jobs", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.sentence()


def test_an_id_that_another_start_has_is_exit_code_4(office: Office, flow: str) -> None:
    job = str(uuid4())
    office.user.run("jobs", "start", flow, "--job", job)
    outcome = office.user.run("jobs", "start", flow, "--job", job, "--request", "7")
    assert outcome.code == 4
    assert "with another flow or request" in outcome.sentence()


def test_a_list_is_narrowed_by_state_flow_and_mesh_and_says_when_there_is_more(office: Office) -> None:
    running, failed = office.running(), office.failed()
    shown = office.user.run("jobs", "list", "--state", "failed", "--flow", "nightly-export")
    assert str(failed) in shown.out
    assert str(running) not in shown.out
    assert "the disk is full" in shown.out
    newest = office.user.run("jobs", "list", "--limit", "1", "--json")
    assert [each["id"] for each in newest.json] == [str(failed)]
    assert "There are more jobs" in newest.err
    assert office.user.run("jobs", "list", "--mesh", "land").out == "no jobs\n"


def test_show_draws_the_tree_with_states_tries_and_ledgers(office: Office) -> None:
    shown = office.user.run("jobs", "show", str(office.running()))
    assert shown.code == 0, shown.err
    steps = [" ".join(line.split()[:6]) for line in shown.out.split("LEDGER")[1].splitlines()[1:]]
    assert [step.rpartition(" ")[0] for step in steps] == [
        "extract done 1 1 001111000000001",
        "├─ load waiting 0 0",
        "└─ count waiting 0 0",
    ]
    assert "open" in shown.out


def test_tree_draws_nothing_but_the_tree(office: Office) -> None:
    shown = office.user.run("jobs", "tree", str(office.running()))
    assert shown.out == "extract  done\n├─ load  waiting\n└─ count  waiting\n"


def test_a_tree_of_many_children_that_are_alike_draws_them_as_one_line(office: Office) -> None:
    job = str(office.running(*[Child(uuid4(), "load", f'{{"part": {number}}}') for number in range(200)]))
    assert office.user.run("jobs", "tree", job).out == "extract  done\n└─ load  waiting  (200 of them)\n"
    assert len(office.user.run("jobs", "tree", job, "--json").json) == 201


def test_show_tells_children_apart_by_what_they_were_spawned_with(office: Office) -> None:
    long = Child(uuid4(), "load", f'"{"x" * 100}"')
    job = str(office.running(Child(uuid4(), "load", '{"part": "north"}'), long))
    _, north, cut = office.user.run("jobs", "show", job).out.split("REQUEST")[1].splitlines()[1:]
    assert north.endswith('{"part": "north"}')
    assert cut.endswith('"' + 28 * "x" + "…")
    (shown,) = office.user.run("jobs", "show", job, "--json").json
    assert [activity["request"] for activity in shown["activities"]] == [{"day": 1}, {"part": "north"}, 100 * "x"]


def test_a_job_is_cancelled_for_good_and_says_by_whom_and_why(office: Office) -> None:
    job = office.running()
    office.user.environment.update(LOGNAME="ceo", USER="ceo")
    done = office.user.run("jobs", "cancel", str(job), "--reason", "the wrong day", "--yes")
    assert (done.code, done.out) == (0, f"{job} cancelled\n")
    shown = office.user.run("jobs", "show", str(job)).out
    assert shown.count("the wrong day") == 2
    assert "administrator" in shown
    assert "ceo" not in shown
    assert "├─ load" in shown
    assert "stopped" in shown
    for verb in ("cancel", "retry"):
        again = office.user.run("jobs", verb, str(job), "--reason", "x", "--yes")
        assert again.code == 4
        assert "cancelled" in again.sentence()


def test_a_failed_job_goes_on_after_a_retry(office: Office) -> None:
    job = office.failed()
    assert "the disk is full" in office.user.run("jobs", "show", str(job)).out
    done = office.user.run("jobs", "retry", str(job), "--reason", "mended", "--yes", "--json")
    assert done.json == [{"id": str(job), "done": "retry"}]
    assert office.state(job) == "running"
    assert office.user.run("jobs", "retry", str(job), "--reason", "x", "--yes").code == 4


def test_several_jobs_come_from_a_list_and_one_that_is_refused_holds_up_none(office: Office) -> None:
    jobs = [office.failed(), office.running(), office.failed()]
    listed = "".join(f'{{"id":"{job}"}}\n' for job in jobs)
    outcome = office.user.run("jobs", "retry", "-", "--reason", "mended", "--yes", stdin=listed)
    assert outcome.code == 1
    assert outcome.out == f"{jobs[0]} retried\n{jobs[2]} retried\n"
    assert f"the job {jobs[1]} cannot be retried: it is running" in outcome.err
    assert [office.state(job) for job in jobs] == ["running"] * 3


def test_of_jobs_that_a_postgres_which_fails_left_the_others_are_said_to_be_retried(office: Office) -> None:
    jobs = [str(office.failed()) for _ in range(3)]
    with ending_session(office.url, f"sea {jobs[1]}"):
        cut_off = office.user.run("jobs", "retry", *jobs, "--reason", "mended", "--yes")
    assert (cut_off.code, cut_off.out) == (1, f"{jobs[0]} retried\n")
    for left in jobs[1:]:
        assert f"{left}: the broker cannot reach its database: try again" in cut_off.err
    assert [office.state(job) for job in jobs] == ["running", "failed", "failed"]


def test_jobs_that_a_filter_means_are_shown_first_and_changed_with_all(office: Office) -> None:
    flow = ("--flow", "by-filter")
    jobs = [office.user.run("jobs", "start", flow[1], "--first", "extract").out.strip() for _ in range(3)]
    would = office.user.run("jobs", "cancel", "--all", *flow, "--state", "running", "--dry-run")
    assert sorted(would.out.splitlines()) == sorted(f"{job} would be cancelled" for job in jobs)
    assert {office.state(job) for job in jobs} == {"running"}
    assert office.user.run("jobs", "cancel", "--all", *flow, "--mesh", "land", "--yes", "--reason", "x").out == ""
    done = office.user.run("jobs", "cancel", "--all", *flow, "--reason", "the wrong flow", "--yes", "--json")
    assert {each["id"] for each in done.json} == set(jobs)
    assert {office.state(job) for job in jobs} == {"cancelled"}
    for words in (("cancel", "--reason", "x"), ("cancel", jobs[0], "--all"), ("cancel", jobs[0], *flow)):
        assert office.user.run("jobs", *words, "--yes").code == 2


def test_a_dry_run_of_a_retry_foresees_that_no_attempt_is_left(office: Office) -> None:
    async def exhaust(jobs: Jobs) -> UUID:
        begun = await jobs.begin()
        await jobs.set_ledger(begun.root, 999_000_000_000_000)
        await fail_activity(jobs.connection, begun.root, "overflow")
        return begun.job

    job = office.work(exhaust)
    would = office.user.run("jobs", "retry", str(job), "--dry-run")
    assert (would.code, office.state(job)) == (4, "failed")
    assert "start a new job" in would.sentence()


def test_a_dry_run_says_why_a_job_cannot_be_changed_as_the_verb_does(office: Office) -> None:
    job = office.running()
    refused = office.user.run("jobs", "retry", str(job), "--dry-run")
    why = f"the job {job} cannot be retried: it is running: there is nothing to retry"
    assert (refused.code, refused.sentence()) == (4, why)
    assert office.user.run("jobs", "cancel", str(job), "--dry-run").out == f"{job} would be cancelled\n"
    assert office.state(job) == "running"

    assert office.user.run("jobs", "cancel", str(job), "--reason", "x", "--yes").code == 0
    for verb in ("cancel", "retry"):
        would = office.user.run("jobs", verb, str(job), "--dry-run")
        did = office.user.run("jobs", verb, str(job), "--reason", "x", "--yes")
        assert (would.code, would.sentence()) == (did.code, did.sentence())


def test_a_list_longer_than_a_page_is_whole_and_in_order(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [office.user.run("jobs", "start", "paged", "--first", "extract").out.strip() for _ in range(5)]
    monkeypatch.setattr("cli.jobs.CHANGES", 2)
    listed = office.user.run("jobs", "list", "--flow", "paged", "--json").json
    assert [each["id"] for each in listed] == jobs[::-1]


def test_whoever_changes_a_job_is_in_the_one_log_as_the_token_says(office: Office) -> None:
    job = office.user.run("jobs", "start", "logged", "--first", "extract").out.strip()
    office.user.run("jobs", "cancel", job, "--reason", "the wrong day", "--yes")
    ended, begun = office.user.run("log", "--at", "broker", "--noun", "job", "--key", f"sea {job}", "--json").json
    del ended["at"], begun["at"]
    assert begun == {
        "where": "broker", "actor": "administrator", "verb": "start", "noun": "job", "key": f"sea {job}",
        "outcome": "started",
    }  # fmt: skip
    assert ended == {**begun, "verb": "cancel", "outcome": "cancelled", "reason": "the wrong day"}
    assert "the wrong day" in office.user.run("log", "--at", "broker", "--limit", "1").out


def test_an_admin_sees_and_changes_the_jobs_of_its_own_mesh_alone(office: Office, tmp_path: Path) -> None:
    (made,) = office.user.run("member", "create", f"boss{uuid4().hex[:8]}", "--admin", "--mesh", "land", "--json").json
    (token := tmp_path / "token").write_text(made["token"])
    boss = Terminal(**office.user.environment | {"POSTROOM_ADMIN_TOKEN_FILE": str(token), "POSTROOM_MESH": ""})
    del boss.environment["POSTROOM_MESH"]
    theirs = str(office.running())
    own = boss.run("jobs", "start", "by-land", "--first", "extract").out.strip()
    assert [job["id"] for job in boss.run("jobs", "list", "--json").json] == [own]
    for words in (("show", theirs), ("cancel", theirs, "--reason", "x", "--yes")):
        assert boss.run("jobs", *words).code == 3
    assert boss.run("jobs", "list", "--mesh", "sea").code == 77
    assert boss.run("jobs", "cancel", "--all", "--reason", "x", "--yes").out == f"{own} cancelled\n"
    assert office.state(theirs) == "running"


def test_a_cancel_asks_on_a_terminal_and_no_is_no(office: Office) -> None:
    job = office.running()
    asked = office.user.at_a_terminal("jobs", "cancel", str(job), "--reason", "x", answer="n\n")
    assert f"Cancel {job}?" in asked.out
    assert (asked.code, office.state(job)) == (1, "running")


def test_explain_reads_an_activity_and_a_message_without_a_broker() -> None:
    user = Terminal()
    activity = user.run("jobs", "explain", "012110000000003").out
    assert activity.startswith("012110000000003 is the ledger of an activity\n")
    assert "leg 1 was attempted 12 times" in activity
    (message,) = user.run("jobs", "explain", "000111000000003", "--json").json
    assert message["of"] == "message"
    assert message["digits"][1] == {"positions": "4", "digits": "1", "text": "this message closed the job"}


def test_without_a_broker_it_says_what_to_do(office: Office) -> None:
    assert "POSTROOM_BROKER_URL" in Terminal().run("jobs", "list").sentence()
    away = office.user.run("jobs", "list", "--url", "http://127.0.0.1:1")
    assert away.code == 69


def test_a_step_that_no_worker_knows_says_which_and_what_it_waits_for(office: Office) -> None:
    async def work(jobs: Jobs) -> UUID:
        begun = await jobs.begin()
        assert await set_aside(jobs.connection, begun.root, "m-1", None, "post/4711")
        return begun.job

    job = office.work(work)
    shown = office.user.run("jobs", "show", str(job)).out
    assert "waits for a worker that has extract" in shown
    assert "the worker post/4711 has no activity 'extract'" in shown
    assert office.user.run("jobs", "tree", str(job)).out == "extract  unknown\n"
    assert "waits for a worker that has extract" in office.user.run("jobs", "list", "--limit", "1").out
    (listed,) = office.user.run("jobs", "list", "--limit", "1", "--json").json
    assert listed["unknown"] == ["extract"]


def test_explain_tells_what_became_of_a_message(office: Office) -> None:
    async def work(jobs: Jobs) -> tuple[UUID, UUID, UUID, str]:
        begun = await jobs.asked()
        request = await jobs.connection.fetchval("SELECT id FROM ledger.request WHERE activity_id = $1", begun.root)
        answer = f"answer-to-{request}"
        await enter_leg2(jobs.connection, begun.root, answer, LEASE, Answer('{"parts": 2}', request))
        return begun.job, begun.root, request, answer

    job, activity, request, answer = office.work(work)
    told = office.user.run("jobs", "explain", f"{answer}~consumer.1").out
    for said in (f"{activity} (extract)", f"{job} (running)", '{"parts": 2}', "leg 2 of the activity runs for it"):
        assert said in told
    assert "step 1, the work, is not complete" in told
    (asked,) = office.user.run("jobs", "explain", f"{request}/1", "--json").json
    assert asked["sentence"] == f"it is a request of the activity (once, answered by {answer})"
    (shown,) = office.user.run("jobs", "explain", str(activity), "--json").json
    assert (shown["what"], shown["job"], shown["ledger"]) == ("activity", str(job), "001100000000001")


def test_explain_tells_of_a_message_that_only_moved_an_activity_on_or_waits(office: Office) -> None:
    async def work(jobs: Jobs) -> tuple[UUID, UUID]:
        begun = await jobs.asked()
        event = await jobs.connection.fetchval(SPAWNED, str(begun.root))
        await set_aside(jobs.connection, begun.root, "m-aside", Answer("7"), "post/4711")
        return begun.root, event

    activity, event = office.work(work)
    (told,) = office.user.run("jobs", "explain", str(event), "--json").json
    assert (told["what"], told["activity"]) == ("event", str(activity))
    assert told["sentence"] == "it is a transition of the activity (activity_spawned, not published yet)"
    (waits,) = office.user.run("jobs", "explain", "m-aside", "--json").json
    assert "the worker post/4711 set it aside" in waits["sentence"]
    assert waits["said"] == 7


def test_a_step_whose_request_no_stream_takes_says_so(office: Office) -> None:
    async def work(jobs: Jobs) -> UUID:
        begun = await jobs.asked()
        await jobs.connection.execute(REFUSED, begun.job)
        return begun.job

    shown = office.user.run("jobs", "show", str(office.work(work))).out
    assert "its request is not published: maximum payload exceeded" in shown
