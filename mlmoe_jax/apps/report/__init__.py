"""The HTML page about a run folder, written by `page.write_report`."""
