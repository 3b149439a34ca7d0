"""The report of a plan or a run: one HTML file without any other."""

from lightning_gpp.reports.page.page import RunRecord, report_html

__all__ = ["RunRecord", "report_html"]
