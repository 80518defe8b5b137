// The variant: its formulas and gradient, and the code that each kernel system has of it.

function buildVariant() {
  byId("formulas").replaceChildren(...view.data.formulas.map(formula));
  const tabs = Object.keys(view.data.code).map((system) =>
    element("button", { type: "button", role: "tab", id: `tab-${system}`, "aria-controls": "code" }, system),
  );
  byId("code-tabs").replaceChildren(...tabs);
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => showCode(tab.textContent));
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by === undefined) return;
      event.stopPropagation(); // here arrows choose a tab, not a step
      const other = tabs[(at + by + tabs.length) % tabs.length];
      other.focus();
      showCode(other.textContent);
    });
  });
  showCode(view.system);
}

function formula({ name, text, latex, mathml }) {
  const figure = element("figure", { class: "formula" }, element("figcaption", {}, name));
  if (mathml !== null) {
    const shown = element("div", { class: "math" });
    // Made by formula.py, of names, numbers and operators alone.
    shown.innerHTML = `<math displaystyle="true">${mathml}</math>`;
    figure.append(shown);
  }
  const lines = Object.entries({ text, LaTeX: latex }).filter(([, line]) => line !== null);
  if (lines.length === 0) figure.append(element("p", { class: "note" }, "too long for a formula; the code has it"));
  else
    figure.append(
      element(
        "details",
        {},
        element("summary", {}, `as ${lines.map(([kind]) => kind).join(" and ")}`),
        ...lines.map(([, line]) => element("code", {}, line)),
      ),
    );
  return figure;
}

function showCode(system) {
  view.system = system;
  for (const tab of byId("code-tabs").children) {
    const chosen = tab.textContent === system;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
  }
  byId("code").setAttribute("aria-labelledby", `tab-${system}`);
  byId("code").textContent = view.data.code[system];
}
