"""Publishing: cards, the upload to the Hub, verification, the audit of a source, and the HTML report."""
