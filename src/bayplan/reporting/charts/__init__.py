"""The pictures of a report: one file each, from records to charts."""
