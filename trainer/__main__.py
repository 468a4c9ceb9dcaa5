"""The command line ``python -m trainer +recipe=NAME [key=value ...]``. This module imports neither torch nor mlflow."""

from __future__ import annotations

import contextlib
import os
import sys

from trainer.host import early_signals, interpreter  # all else is imported once signals are taken


def main(argv: list[str] | None = None) -> int:
    """The main function of ``python -m trainer``: run a command line; returns the exit code.
    0 done, 1 failed, 2 wrong input, 75 pre-empted, 130 interrupted."""
    from trainer.cli import hidden_arguments
    from trainer.config import redact
    from trainer.terminal import streams

    with streams.guarded():
        redact.HERE.learn(redact.of_environment(os.environ), redact.of_command_line(argv or sys.argv[1:]))
        if argv is None:
            hidden_arguments.cover()
            _import_alike()
        return _answer(sys.argv[1:] if argv is None else argv)


def _import_alike() -> None:
    """Processes that this one starts look for modules in the working folder only if this one does.

    The installed command does not; Python's ``-m`` and ``-c``, by which other processes start, would, and anybody may
    have put a ``json.py`` into the folder.
    """
    with contextlib.suppress(OSError):  # the folder is gone
        if not {"", os.getcwd()} & set(sys.path):
            os.environ["PYTHONSAFEPATH"] = "1"


def _answer(argv: list[str]) -> int:
    import traceback

    from trainer.errors import BY_CTRL_C, Interrupted, RunFailed, UserError
    from trainer.host import machine_limits
    from trainer.visible import one_line

    try:
        with machine_limits.named():
            return _dispatch(argv)
    except (UserError, RunFailed, Interrupted) as error:
        if {"debug=true", "verbosity=debug"}.intersection(argv):
            traceback.print_exc()
        word = {2: "error", 1: "failed", 75: "preempted", 130: "interrupted"}.get(error.exit_code, "failed")
        print(f"{word}: {one_line(str(error)) if error.exit_code == UserError.exit_code else error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):  # what to type next, after all else
            print(note, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"interrupted: {error or BY_CTRL_C}", file=sys.stderr)
        return Interrupted.exit_code
    except OSError as error:  # a disk that is full, a folder that is gone
        if "debug=true" in argv:
            traceback.print_exc()
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except Exception:  # a mistake of ours; here and not by the interpreter, which would show secrets
        traceback.print_exc()
        return 1


def command() -> None:
    """Entry point of ``python -m trainer`` and of the script ``trainer``: run the command line and end the process."""
    early_signals.install()
    with interpreter.command() as codes:
        codes.append(main())


def _dispatch(argv: list[str]) -> int:
    """Do what the parsed flags of ``python -m trainer`` ask for: print help, config or plan, run a sweep or a job."""
    from trainer.terminal import streams

    if argv and argv[0].isalpha():  # a word; flags have a dash, and overrides a sign
        from trainer.cli import verbs

        if isinstance(answer := verbs.answer(argv), int):
            return answer
        argv = answer

    if any(a in ("-h", "--help") for a in argv):
        from trainer.cli.help import show_help

        with streams.answering():
            show_help(argv)
        return 0
    from trainer.cli.arguments import argument_parser, parse, typed_flags
    from trainer.errors import UserError
    from trainer.host import torchrun
    from trainer.host.engine_tasks import FROZEN, tasks_of
    from trainer.host.folder_checks import check_working_folder

    check_working_folder()
    if tasks_of(os.environ):
        from trainer.host import engine_ranks

        engine_ranks.adopt(os.environ, argv)
    if torchrun.is_rank():
        from trainer.cli.torchrun import join

        return join(lambda: parse(argv))
    with streams.answering():  # --version
        args = parse(argv)
    if "verbosity=quiet" not in args.overrides:
        streams.wait_for("reading the config")
    from trainer.cli import compose
    from trainer.cli.commands import chosen

    asking = chosen(args.overrides, args.config_name, typed_flags(args))
    with compose.hydra_app(None if FROZEN in os.environ else args.config_dir) as app, asking as asked:
        config_name, args.overrides = asked.config_name, asked.overrides
        if args.cfg or args.info or args.shell_completion:
            from trainer.cli.show_config import show

            with streams.answering():
                show(app, args, config_name)
            return 0
        if args.hydra_help:
            from trainer.cli.explain import sentences

            with streams.answering(), sentences(app, args.overrides, config_name):
                app.hydra_help(config_name, argument_parser(), args)
            return 0
        from trainer.cli import commands

        if args.multirun:
            from trainer.cli.sweep import sweep

            if asked.verb:
                raise UserError(
                    f"-m {asked.verb}", "looks at one run at a time", f"python -m trainer {asked.verb} ... for each"
                )
            results = sweep(app, args.overrides, config_name, asked.flags)
            return max(map(commands.exit_code, results), default=0)
        return commands.exit_code(commands.run_one(app, args.overrides, config_name, flags=asked.flags))


if __name__ == "__main__":
    command()
