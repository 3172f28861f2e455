"""`bayplan doctor`: check this machine."""

from cyclopts import App

from bayplan.cli import options

__all__ = ["app", "doctor"]

app = App(name="doctor", help_epilogue="Exit code 0 if all checks pass, 2 if something is BAD.")


@app.default
def doctor(*, on: options.On = None, json: options.Json = False) -> int:
    from bayplan.data.errors import ExitCode
    from bayplan.reporting.text import findings_text
    from bayplan.running.doctor import examine

    findings = examine(on)
    options.show(findings, findings_text(findings), json=json)
    return ExitCode.DONE if all(finding.is_good for finding in findings) else ExitCode.USAGE
