"""`bayplan doctor`: check this machine."""

from bayplan.cli.app import app
from bayplan.data.errors import ExitCode

__all__ = ["doctor"]


@app.command(sort_key=9, help_epilogue="Exit code 0 if all is well, 2 if something is BAD.")
def doctor() -> int:
    """Check this machine: versions, devices, exact memory counting, cache, what is known."""
    from bayplan.reporting.text import findings_text
    from bayplan.running.doctor import examine

    findings = examine()
    print(findings_text(findings))
    return ExitCode.DONE if all(finding.is_good for finding in findings) else ExitCode.USAGE
