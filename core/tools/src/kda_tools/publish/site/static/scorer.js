// What Sphinx's search ranks by: titles that are or hold what is asked, then the glossary, tasks, models, the rest.
"use strict";

const plain = (text) => ` ${text.replace(/<[^>]*>/g, "").toLowerCase().replace(/[^a-z0-9.]+/g, " ").trim()} `;

var Scorer = {
  score: ([docname, title, , , score]) => {
    const named = plain(title);
    const asked = plain(new URLSearchParams(location.search).get("q") ?? "");
    let more = 0;
    if (named === asked) more += 400;
    else if (asked.trim().split(" ").every((word) => named.includes(` ${word} `))) more += 200;
    if (docname === "docs/glossary") return score + more + 120;
    if (/\/docs\/results$/.test(docname)) return score + more + 100;
    if (/^(models\/|rows$)/.test(docname)) return score + more + 40;
    return score + more;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
