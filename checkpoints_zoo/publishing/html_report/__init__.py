"""A report page: population, calibration, ensemble size, detection, pairs, symmetries and mass in one HTML file.

>>> import checkpoints_zoo as zoo
>>> page = zoo.report_page(zoo.load("convnet-digits", n=1), ood=None)
>>> page.html[:15]
'<!doctype html>'
"""

from __future__ import annotations

from checkpoints_zoo.publishing.html_report.assembling import report_page
from checkpoints_zoo.publishing.html_report.leaderboard import leaderboard_page
from checkpoints_zoo.publishing.html_report.page import Page

__all__ = ["Page", "leaderboard_page", "report_page"]
