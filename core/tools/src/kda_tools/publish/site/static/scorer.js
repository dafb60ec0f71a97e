// What Sphinx's search ranks by: pages of tasks first, then models, then the rest.
"use strict";

var Scorer = {
  score: ([docname, , , , score]) => {
    if (/\/docs\/results$/.test(docname)) return score + 100;
    if (/^(models\/|rows$)/.test(docname)) return score + 40;
    return score;
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
