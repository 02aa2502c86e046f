"""One self-contained HTML page about a run folder; `page.write_report` writes it."""
