"""The HTML report about runs and studies, one self-contained page."""
