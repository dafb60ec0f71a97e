"""Commands of a campaign: launch an agent on a task, iterate, look, review, promote."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kda_judge.contract.errors import ExitCode, UsageError
from kda_tools.cli.base import MOST, TaskName, relative
from kda_tools.cli.base import app as kda

app = typer.Typer(help="Campaigns: an agent works on a task in a loop that keeps its evidence.", no_args_is_help=True)
kda.add_typer(app, name="campaign")


def _named(value: str | None) -> str | None:
    """Callback of options that name the signer: refuses an empty name."""
    if value is not None and not value.strip():
        raise typer.BadParameter("expected a name, got none")
    return value


Given = Annotated[str | None, typer.Option("--command", metavar="TEXT", help="For --agent command: a line of Bash.")]


@app.command()
def launch(
    task: TaskName,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="NAME", help="A target of its config.toml; the first if not given."),
    ] = None,
    agent: Annotated[
        str, typer.Option("--agent", metavar="NAME", help="claude, codex, command, or one of your own.")
    ] = "claude",
    command: Given = None,
) -> None:
    """Make a worktree and a branch, check the machine, write the prompt, and start the agent; or continue.

    KDA_BASE_BRANCH: the branch to begin from. KDA_NO_CLAUDE=1: start nothing. KDA_BASH_BIN: the Bash to use.
    """
    from kda_judge.contract.tasks import find_task
    from kda_tools import checkout_folder
    from kda_tools.campaign import launch as launcher
    from kda_tools.campaign.prompt import tokens

    found, root = find_task(task), checkout_folder.root()
    chosen = target or next(iter(found.config.targets), None)
    if chosen is None:
        raise UsageError(f"{found.path / 'config.toml'}: no [targets.NAME]: a campaign is for one kind of GPU")
    prepared = launcher.prepare(root, found, chosen, agent, command)
    process = prepared.process
    text = process.prompt.read_text(encoding="utf-8")
    typer.echo(f"{'goes on' if prepared.resumed else 'launched'}: campaign {prepared.campaign.name}")
    typer.echo(f"worktree: {prepared.campaign.repository.root}, branch {prepared.campaign.branch}")
    for check in prepared.lacking:
        typer.echo(f"warning: {check.name}: {check.found}: {check.remedy}")
    typer.echo(f"prompt: {process.prompt}, about {tokens(text)} tokens")
    if launcher.prepare_only():
        typer.echo(f"{launcher.PREPARE_ONLY} is set: nothing was started. It would be:")
        typer.echo(f"  {shlex.join(process.command)}" + " < PROMPT" * process.by_stdin)
        return
    code = launcher.start(process)
    typer.echo(
        f"the agent ended with {code}; what it recorded: kda campaign status, in {prepared.campaign.repository.root}"
    )
    raise typer.Exit(ExitCode.OK if code == 0 else ExitCode.ARM_FAILED)


@app.command()
def iterate(
    message: Annotated[
        str, typer.Option("-m", "--message", metavar="TEXT", help="What is changed, and why it should be faster.")
    ],
    rows: Annotated[list[str] | None, typer.Option("--rows", metavar="PATTERN", help="Only these rows decide.")] = None,
    direction: Annotated[
        str | None, typer.Option("--direction", metavar="TEXT", help="The new direction, if a change is due.")
    ] = None,
) -> None:
    """Verify and measure what the worktree holds, keep or revert it, and record that: one iteration."""
    from kda_tools.campaign.iterate import iterate as run
    from kda_tools.campaign.place import current_campaign
    from kda_tools.campaign.views import print_done

    campaign = current_campaign()
    done = run(campaign, message, tuple(rows or ()), direction)
    print_done(campaign.state().begun[done.iteration], done)


@app.command()
def resume() -> None:
    """Finish an iteration that was interrupted. `iterate` does it too, before it begins."""
    from kda_tools.campaign.iterate import finish_interrupted
    from kda_tools.campaign.place import current_campaign
    from kda_tools.campaign.views import print_done, print_status

    campaign = current_campaign()
    if (done := finish_interrupted(campaign)) is not None:
        print_done(campaign.state().begun[done.iteration], done)
    print_status(campaign, campaign.state())


@app.command()
def status() -> None:
    """Show the best so far, what was tried, and the budgets that are left."""
    from kda_tools.campaign.place import current_campaign
    from kda_tools.campaign.views import print_status

    campaign = current_campaign()
    print_status(campaign, campaign.state())


@app.command()
def review(
    agent: Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Have this agent review, too.")] = None,
    person: Annotated[
        str | None,
        typer.Option("--person", metavar="NAME", callback=_named, help="Sign: you went through the checklist."),
    ] = None,
    finding: Annotated[
        list[str] | None,
        typer.Option("--finding", metavar="TEXT", help="With --person: what you found; may be repeated."),
    ] = None,
    command: Given = None,
) -> None:
    """Review the best version: a program first, then an agent or a person. Findings block promotion until answered."""
    from kda_tools.campaign import review as reviews
    from kda_tools.campaign.place import current_campaign
    from kda_tools.campaign.views import finding as words

    if finding and not person:
        raise UsageError("--finding: expected with --person: a finding has an author")
    campaign = current_campaign()
    with campaign.alone():
        reviews.check(campaign)
        if agent:
            reviews.by_agent(campaign, agent, command)
        if person:
            reviews.record(campaign, person, [("person", "solution/", text) for text in finding or ()])
    state = campaign.state()
    for one in state.findings.values():
        reply = state.answers.get(one.number)
        typer.echo(f"{words(one)}{f' -- answered by {reply.by}: {reply.text}' if reply else ''}")
    if not agent and not person:
        typer.echo("checklist for a person; sign with --person NAME and --finding TEXT for each that does not hold:")
        for question in reviews.CHECKLIST:
            typer.echo(f"- {question}")
    typer.echo(f"{len(state.findings)} findings about commit {state.best[:10]}, {len(state.unanswered)} not answered")
    if state.unanswered:
        raise typer.Exit(ExitCode.UNFIT_ROWS)


@app.command()
def answer(
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="The finding's number.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Why it is harmless, or what was changed.")],
    by: Annotated[str, typer.Option("--by", metavar="NAME", callback=_named, help="Who answers.")] = "agent",
) -> None:
    """Answer a finding of a review; the answer is recorded."""
    from kda_tools.campaign import review as reviews
    from kda_tools.campaign.place import current_campaign

    campaign = current_campaign()
    with campaign.alone():
        reviews.answer(campaign, number, by, text)
    typer.echo(f"answered: {len(campaign.state().unanswered)} findings are not answered")


@app.command()
def promote() -> None:
    """Verify the best version in a clean checkout with fresh seeds and the grid, measure it with A/A, record it."""
    from kda_tools.campaign.place import current_campaign
    from kda_tools.campaign.promote import promote as run

    campaign = current_campaign()
    with campaign.alone():
        promoted = run(campaign)
    typer.echo(promoted.reason)
    for name, found in (
        ("faster rows", promoted.wins),
        ("slower rows", promoted.losses),
        ("faster models", promoted.models),
    ):
        typer.echo(f"{name}: {', '.join(found) or 'none'}")
    if promoted.run_id is None:
        raise typer.Exit(ExitCode.UNFIT_ROWS)


@app.command()
def simulate(
    campaigns: Annotated[
        int, typer.Option("--campaigns", min=100, max=10 * MOST, help="Campaigns for each kind of noise.")
    ] = 4000,
    record: Annotated[
        bool, typer.Option("--record", help="Append it to docs/campaign_noise.jsonl; then: kda publish.")
    ] = False,
) -> None:
    """Simulate how often a campaign keeps something that is no better, on the noise of the recorded runs."""
    from kda_judge.contract.tasks import all_tasks, checkout_root
    from kda_judge.evidence import record_log
    from kda_tools.campaign import noise_page
    from kda_tools.campaign.rules import Rules
    from kda_tools.campaign.simulate import FILE
    from kda_tools.campaign.simulate import simulate as run

    found = run(all_tasks(), Rules(), campaigns)
    typer.echo(noise_page.table_md(found))
    if record:
        path = (checkout_root() or Path.cwd()) / "docs" / FILE
        record_log.append(path, found)
        typer.echo(f"appended to {relative(path)}; bring the page up to date: kda publish")
