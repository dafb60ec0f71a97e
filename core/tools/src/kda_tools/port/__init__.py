"""Porting back: a task's export as a patch to an SGLang tree, what a pull request needs, and AKO4ALL's folders."""
