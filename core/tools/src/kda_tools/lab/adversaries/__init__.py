"""Runs arms that cheat or fail, and checks the judge's verdict on each: `nox -s adversaries` shows the table.

`arms/` holds one file per adversary, `table.py` what is expected of the judge, `suite.py` the run through the real
judge with real workers, `page.py` the record and docs/adversaries.md.
"""
