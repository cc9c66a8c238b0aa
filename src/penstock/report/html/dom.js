// Elements from names, attributes and children; text is always set as text, so names in a record cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

function html(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

// Draw into an element now and whenever its width changes; `draw` is given the width in pixels.
function drawWithin(element, draw) {
  let last = 0;
  const redraw = () => {
    const width = Math.floor(element.clientWidth);
    if (width > 0 && width !== last) {
      last = width;
      element.replaceChildren(draw(width));
    }
  };
  new ResizeObserver(redraw).observe(element);
  redraw();
  return () => {
    last = 0;
    redraw();
  };
}

// A table whose columns are {title, cell(row), numeric}; `mark(row)` names the class of a row.
function table(columns, rows, mark = () => null, caption = null) {
  const head = columns.map(({ title, numeric }) => html("th", { scope: "col", class: numeric ? "number" : null }, title));
  const body = rows.map((row) =>
    html("tr", { class: mark(row) }, columns.map(({ cell, numeric }, index) =>
      html(index ? "td" : "th", { class: numeric ? "number" : null, scope: index ? null : "row" }, cell(row)))));
  return html("table", {},
    caption ? html("caption", {}, caption) : null,
    html("thead", {}, html("tr", {}, head)),
    html("tbody", {}, body));
}

// Say under a table that is wider than its place that there is more to see; a scrolled one needs no telling.
function hintAtMore(element) {
  const look = () => element.toggleAttribute("data-more", element.scrollWidth - element.clientWidth - element.scrollLeft > 8);
  new ResizeObserver(look).observe(element);
  element.addEventListener("scroll", look, { passive: true });
  new MutationObserver(look).observe(element, { childList: true });
  look();
}

// A chooser among names; `choose` is called with the index. Null where there is nothing to choose.
function chooser(label, names, choose) {
  if (names.length < 2) return null;
  const options = names.map((name, index) => html("option", { value: index }, name));
  const select = html("select", { onchange: (event) => choose(Number(event.target.value)) }, options);
  return html("label", { class: "chooser" }, label, " ", select);
}
