// What Sphinx's search ranks by: titles that are, hold or lie in what is asked, then the glossary, tasks, models, the
// rest. Words such as "how" and "the" do not count: Sphinx's `stopwords`, which stand above this in the same file.
"use strict";

const content = (text) =>
  text.replace(/<[^>]*>/g, "").toLowerCase().split(/[^a-z0-9.]+/).filter((word) => word && !stopwords.has(word));
const isIn = (words, others) => words.every((word) => others.includes(word));

var Scorer = {
  score: ([docname, title, anchor, , score]) => {
    const named = content(title);
    const asked = content(new URLSearchParams(location.search).get("q") ?? "");
    let more = 0;
    if (named.join() === asked.join()) more += 400;
    // A task's card, or a section of its documents, may have the op's name: it stays behind the task's page.
    else if (/^\w+\/\w\d+_\w+\/(prompt$|.*#)/.test(docname + anchor)) more += 50;
    // A title of one word lies in too many questions: that of a model in every one about its kernels.
    else if (isIn(asked, named) || (named.length > 1 && isIn(named, asked))) more += 200;
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
