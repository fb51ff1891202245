"""The report: one page on which a person sees what a run found."""
