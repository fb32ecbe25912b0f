"use strict";
const at = name => document.getElementById(name);
let number = 0, shown = null, field = 0, marks = {}, corrections = {};

async function ask(path, body) {
  const answer = await fetch(path, body === undefined ? {} : {
    method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body)});
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}
function chip({text, colour}) {
  const made = element("span", text, "sure");
  made.style.borderColor = colour;
  return made;
}
function draw() {
  at("title").textContent = shown.property_id;
  at("note").textContent = `${shown.number + 1} of ${shown.total}, ${shown.reviewed} reviewed` +
    (shown.why ? `. ${shown.why}` : "");
  at("images").replaceChildren(...shown.images.map(image => {
    if (image.data === null) return element("div", `${image.uri} cannot be shown`, "gone");
    const shownImage = element("img"); shownImage.src = image.data; shownImage.alt = shownImage.title = image.uri;
    return shownImage; }));
  at("fields").replaceChildren(...shown.fields.map(({name, value, sure}, row) => {
    const line = element("tr", undefined, [marks[name] || "", row === field ? "at" : ""].join(" "));
    const text = name in corrections ? `${value} → ${corrections[name]}` : value;
    line.append(element("td", name), element("td", text), element("td"), element("td", marks[name] || ""));
    if (sure) line.children[2].append(chip(sure));
    const buttons = element("td");
    for (const [key, label] of [["r", "right"], ["w", "wrong"], ["c", "correct …"]]) {
      const button = element("button", label);
      button.addEventListener("click", event => { event.stopPropagation(); field = row; act(key); });
      buttons.append(button);
    }
    line.append(buttons);
    line.addEventListener("click", () => { field = row; draw(); });
    return line; }));
  const {text, bands} = shown.legend;
  at("legend").replaceChildren(...(shown.fields.some(({sure}) => sure) ? [`${text}:`, ...bands.map(chip)] : []));
  at("accuracy").textContent = shown.accuracy.join(" · ");
}
async function show(next) {
  shown = await ask(`/property/${next}`);
  number = shown.number; field = 0; marks = shown.marks; corrections = shown.corrections;
  draw();
}
function mark(kind) {
  const name = shown.fields[field].name;
  marks[name] = kind; delete corrections[name];
  field = Math.min(field + 1, shown.fields.length - 1);
}
async function press(key) {
  if (!shown) return;
  if (key === "ArrowDown") field = Math.min(field + 1, shown.fields.length - 1);
  else if (key === "ArrowUp") field = Math.max(field - 1, 0);
  else if (key === "r") mark("right");
  else if (key === "w") mark("wrong");
  else if (key === "a") shown.fields.forEach(({name}) => { marks[name] = marks[name] || "right"; });
  else if (key === "c") {
    const name = shown.fields[field].name, correction = window.prompt(`What is right for ${name}?`);
    if (correction !== null) { mark("wrong"); corrections[name] = correction; }
  }
  else if (key === "s") return show(Math.min(number + 1, shown.total - 1));
  else if (key === "b") return show(Math.max(number - 1, 0));
  else if (key === "Enter") {
    const marked = kind => Object.keys(marks).filter(name => marks[name] === kind);
    await ask(`/verdict/${number}`, {right: marked("right"), wrong: marked("wrong"), corrections});
    return show(Math.min(number + 1, shown.total - 1));
  }
  draw();
}
function act(key) {
  press(key).then(() => { at("trouble").textContent = ""; },
    error => { at("trouble").textContent = error.message; });
}
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (["ArrowDown", "ArrowUp", "Enter"].includes(event.key)) event.preventDefault();
  act(event.key);
});
for (const button of document.querySelectorAll("button[data-key]")) {
  // A button with the focus would take the next Enter for itself.
  button.addEventListener("click", () => { button.blur(); act(button.dataset.key); });
}
show(0).catch(error => { at("trouble").textContent = error.message; });
