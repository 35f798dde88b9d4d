// Filters the matrix of the first page. Without it the page shows all, and hides the form.
"use strict";

(() => {
  const form = document.getElementById("filters");
  const shown = document.getElementById("shown");
  const nothing = document.getElementById("nothing");
  const sheets = [...document.querySelectorAll("details.sheet")];
  const releases = [...form.elements.release.options].slice(1).map((option) => option.value);
  const names = ["release", "family", "theorem", "manager", "verdict"];

  const wanted = () => Object.fromEntries(names.map((name) => [name, form.elements[name].value]));

  /** Shows of a row what is wanted; returns how many verdicts that is. */
  function showRow(row, want) {
    let count = 0;
    [...row.cells].slice(1).forEach((cell, i) => {
      const inColumn = !want.release || want.release === releases[i];
      const isWanted = !want.verdict || cell.classList.contains(want.verdict);
      const isShown = inColumn && isWanted && cell.firstChild !== null;
      cell.hidden = !inColumn;
      cell.classList.toggle("off", !isShown);
      count += isShown;
    });
    const isOfFamily = !want.family || want.family === row.dataset.family;
    row.hidden = !isOfFamily || count === 0;
    return row.hidden ? 0 : count;
  }

  function showSheet(sheet, want) {
    const isOfTheorem = !want.theorem || want.theorem === sheet.dataset.theorem;
    let count = 0;
    for (const body of isOfTheorem ? sheet.querySelectorAll("tbody") : []) {
      const isOfManager = !want.manager || want.manager === body.dataset.manager;
      let inBody = 0;
      for (const row of isOfManager ? [...body.rows].slice(1) : []) inBody += showRow(row, want);
      body.hidden = inBody === 0;
      count += inBody;
    }
    for (const [i, cell] of [...sheet.querySelectorAll("thead th")].slice(1).entries())
      cell.hidden = Boolean(want.release) && want.release !== releases[i];
    for (const [i, chip] of [...sheet.querySelectorAll(".chip")].entries())
      chip.hidden = Boolean(want.release) && want.release !== releases[i];
    sheet.hidden = count === 0;
    return count;
  }

  function show() {
    const want = wanted();
    const isNarrowed = names.some((name) => name !== "release" && want[name]);
    let count = 0;
    let theorems = 0;
    for (const sheet of sheets) {
      const inSheet = showSheet(sheet, want);
      sheet.open = isNarrowed && inSheet > 0;
      count += inSheet;
      theorems += inSheet > 0;
    }
    shown.value = `${count.toLocaleString("en")} verdicts of ${theorems} theorems`;
    nothing.hidden = count > 0;
  }

  /** Keeps what is chosen in the address, so that it can be shared and found again. */
  function keep() {
    const chosen = Object.entries(wanted()).filter(([, value]) => value);
    const hash = new URLSearchParams(chosen).toString();
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  }

  function restore() {
    const hash = location.hash.slice(1);
    const sheet = hash && !hash.includes("=") && document.getElementById(hash);
    const chosen = new URLSearchParams(sheet ? "" : hash);
    for (const name of names) {
      const options = [...form.elements[name].options].map((option) => option.value);
      const value = chosen.get(name) ?? "";
      form.elements[name].value = options.includes(value) ? value : "";
    }
    show();
    if (sheet && sheets.includes(sheet)) {
      sheet.open = true;
      sheet.scrollIntoView();
    } else if (names.some((name) => form.elements[name].value)) {
      document.getElementById("matrix").scrollIntoView();
    }
  }

  form.addEventListener("change", () => { show(); keep(); });
  form.addEventListener("reset", () => setTimeout(() => { show(); keep(); }));
  form.addEventListener("submit", (event) => event.preventDefault());
  // A link to a place on the page, as the one to its content, says nothing of the filters.
  addEventListener("hashchange", () => {
    const place = document.getElementById(location.hash.slice(1));
    if (!place || sheets.includes(place)) restore();
  });
  addEventListener("beforeprint", () => { for (const sheet of sheets) if (!sheet.hidden) sheet.open = true; });
  form.hidden = false;
  restore();
})();
