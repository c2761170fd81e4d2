// What is nicer with a script. Every page works without it.

function withCopy(command) {
  if (!navigator.clipboard) return;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "plain";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(command.querySelector("code").textContent);
    button.textContent = "Copied";
  });
  command.append(button);
}

document.querySelectorAll(".command").forEach(withCopy);

// A box in the head of a list chooses all of its page.
for (const table of document.querySelectorAll("table[data-choose]")) {
  const boxes = table.querySelectorAll('tbody input[type="checkbox"]');
  const head = table.querySelector("thead th");
  if (!boxes.length || !head) continue;
  const all = document.createElement("input");
  all.type = "checkbox";
  all.setAttribute("aria-label", "Choose all of this page");
  all.addEventListener("change", () => boxes.forEach((box) => { box.checked = all.checked; }));
  head.replaceChildren(all);
}

// The overview shows what the console streams to it, always as text.
const live = document.querySelector("[data-stream]");
if (live) {
  const trouble = document.querySelector("[data-trouble]");
  const wrong = document.querySelector("[data-wrong]");
  let shown = "";
  const source = new EventSource(live.dataset.stream);
  source.addEventListener("error", () => {
    trouble.hidden = false;
    trouble.textContent = source.readyState === EventSource.CLOSED
      ? "The log-in has ended: reload the page. What it shows is from before."
      : "The console does not answer. What this page shows is from before.";
  });
  source.addEventListener("message", (event) => {
    const news = JSON.parse(event.data);
    trouble.hidden = !news.trouble;
    trouble.textContent = news.trouble || "";
    if (news.trouble) return;
    for (const place of document.querySelectorAll("[data-live]")) {
      const text = news.numbers[place.dataset.live];
      if (text !== undefined && place.textContent !== text) place.textContent = text;
    }
    for (const path of document.querySelectorAll("[data-path]")) path.setAttribute("d", news.paths[path.dataset.path]);
    if (shown === JSON.stringify(news.wrong)) return;
    shown = JSON.stringify(news.wrong);
    wrong.replaceChildren(...(news.wrong.length ? news.wrong.slice(0, 50) : [{ what: "Nothing." }]).map(({ thing, what, help, level }) => {
      const item = document.createElement("li");
      if (thing) {
        const name = document.createElement("strong");
        name.textContent = thing;
        item.append(name, ": ");
      }
      item.append(what + " ");
      if (help === undefined) {
        item.className = "well";
        return item;
      }
      item.className = level;
      const command = document.createElement("span");
      command.className = "command";
      const code = document.createElement("code");
      code.textContent = help;
      command.append(code);
      withCopy(command);
      item.append(command);
      return item;
    }));
  });
}
