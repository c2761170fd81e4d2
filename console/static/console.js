// What is nicer with a script. Every page works without it.

for (const command of document.querySelectorAll(".command")) {
  if (!navigator.clipboard) break;
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
