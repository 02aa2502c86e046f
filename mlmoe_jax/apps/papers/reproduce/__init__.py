"""The tables and figures of the papers, trained and measured here."""
