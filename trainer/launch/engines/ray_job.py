"""A job of Ray: lives one after another, each with a placement group of its own, until one of them ends the job.

A life goes through these phases. Every question about the job's state moves it on; nothing here waits for long::

    placing --> meeting --> running --> over
    (the group)  (addresses)   |
                               '- a host is lost or draining: SIGTERM to the others, SIGKILL after their grace

What the end of a life means:

- Exit code 0 or 2 of host 0: the end of the job.
- A node that was draining (Ray takes it away soon), or exit code 75 that nobody here has asked for: again,
  ``launch.max_preemptions`` times.
- A lost host: again, ``launch.max_restarts`` times. A host that is silent for the grace after host 0 ended is lost too.
- Any other exit code: the end of the job.

A life that comes again has a new group, which Ray places on other nodes, and ``TRAINER_RESUME=auto``.
"""

from __future__ import annotations

import codecs
import importlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import Interrupted, RunPreempted, UserError, first_line
from trainer.host.engine_tasks import CARRIED, HOST, HOSTS, LAUNCHER_VARIABLES, RAY, RESUME, RUN_DIR, SUBMITTED
from trainer.launch.engines import ray_hosts
from trainer.launch.engines.contract import ENDED, PENDING, REQUEUED, RUNNING, Handle, Job, State, Unreachable
from trainer.launch.engines.copies import carried
from trainer.launch.engines.engine_folder import failed_hosts, setup_lines
from trainer.planning.run_secret import VARIABLE

PLACING, MEETING, STARTED = "placing", "meeting", "started"
ANSWER_S = 2.0
"""So long the actors' answers are waited for at once; what comes later is read at the next question."""
SLACK_S = 5.0
"""Between the end of the grace and SIGKILL."""
CANCEL_POLL_S = 0.2


def command_of(job: Job) -> list[str]:
    """The command that a host starts."""
    words = [*job.command, "-m", *(["trainer.launch.engines.carried"] if job.copies else ["trainer", *job.words])]
    return ["bash", "-c", f'{setup_lines(job.setup)}exec "$@"', "trainer", *words] if job.setup else words


def variables_of(job: Job, secret: str, host: int, places: Sequence[tuple[str, Any]], life: int = 0) -> dict[str, str]:
    """The variables of one host's command.

    Args:
        places: address and free port of each host.
    """
    address, port = places[0]
    found = {
        SUBMITTED: RAY,
        **({CARRIED: carried(job)[0].text()} if job.copies else {RUN_DIR: str(job.folder)}),
        VARIABLE: secret,
        HOSTS: str(job.hosts),
        HOST: str(host),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    return {**found, RESUME: "auto"} if life else found


@dataclass(frozen=True)
class Bundle:
    """What one host reserves of its node; memory in bytes.

    Attributes:
        custom: amounts of the cluster's own resources, by their names.
    """

    cores: int
    gpus: int
    memory: int
    custom: Mapping[str, float]

    def plain(self) -> dict[str, float]:
        """The amounts by Ray's names."""
        amounts = {"CPU": self.cores, "GPU": self.gpus, "memory": self.memory, **self.custom}
        return {name: amount for name, amount in amounts.items() if amount}


@dataclass
class _Host:
    """One host of a life.

    Attributes:
        actor: Ray's handle of it. asked: the call that is under way. node, address, port: where it is.
        has_begun: it has said that its command is started. code: its exit code; None: it has not ended. is_lost: it can
        no longer say.
    """

    number: int
    actor: Any
    asked: Any = None
    node: str = ""
    address: str = ""
    port: int = 0
    has_begun: bool = False
    code: int | None = None
    is_lost: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_lost or self.code is not None

    @property
    def name(self) -> str:
        return f"host {self.number}{f' ({self.address})' if self.address else ''}"


class _Life:
    """A placement group, and the actors in it.

    Attributes:
        phase: ``placing``, ``meeting`` or ``started``. said: lines for the screen, that are not printed yet.
        is_preempted: Ray takes a node away, and the hosts are ended. refusal: why a host cannot start the command.
    """

    def __init__(self, job: RayJob, number: int) -> None:
        self.job, self.number, self.ray = job.job, number, job.ray
        self.variables, self.clock, self.bundle = job.variables, job.clock, job.bundle
        self.groups = importlib.import_module("ray.util.placement_group")
        self.group = self.groups.placement_group([self.bundle.plain()] * self.job.hosts, strategy="STRICT_SPREAD")
        self.phase, self.hosts, self.said = PLACING, list[_Host](), list[str]()
        self.decode, self.is_within_a_line = codecs.getincrementaldecoder("utf-8")("replace").decode, False
        self.is_preempted, self.refusal = False, ""
        self.ends_since: float | None = None

    def advance(self) -> None:
        """Read what Ray and the actors say, and do what follows from it."""
        if self.phase == PLACING and self._table().get("state") == "CREATED":
            self.hosts = [_Host(number, self._actor(number)) for number in range(self.job.hosts)]
            self.phase = MEETING
            for host in self.hosts:
                self._ask_to_begin(host)
        elif self.phase == MEETING:
            for host, place in self._answers():
                host.node, host.address, host.port = place
            if all(host.node for host in self.hosts):
                self._start()
        elif self.phase == STARTED:
            self._read_news()
        self._end_what_remains()

    def _table(self) -> Mapping[str, Any]:
        table: Mapping[str, Any] = self.groups.placement_group_table(self.group)
        return table

    def waits_for(self) -> str:
        """Why the hosts have not begun, in Ray's words and in numbers."""
        if self.phase != PLACING:
            return "actors start"
        amounts = self.bundle.plain()
        wanted = ", ".join(f"{amount:.10g} {name}" for name, amount in amounts.items())
        alive = [node.get("Resources", {}) for node in self.ray.nodes() if node.get("Alive")]
        fit = sum(all(has.get(name, 0) >= amount for name, amount in amounts.items()) for has in alive)
        if fit < self.job.hosts:
            return f"{fit} of {self.job.hosts} nodes with {wanted} are there"
        said = str((self._table().get("stats") or {}).get("scheduling_state", ""))
        return "" if said == "FINISHED" else said.lower().replace("_", " ")

    def _actor(self, number: int) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        options = {
            "num_cpus": self.bundle.cores,
            "num_gpus": self.bundle.gpus,
            "memory": self.bundle.memory or None,
            "resources": dict(self.bundle.custom),
            "max_restarts": 0,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=number
            ),
        }
        return self.ray.remote(ray_hosts.Host).options(**options).remote()

    def _answers(self) -> Iterator[tuple[_Host, Any]]:
        """Yield each answer of an actor that has come; an actor that has died is a lost host.

        Raises:
            RayError: the cluster does not answer, or has lost one; the call comes again.
        """
        asked = {host.asked: host for host in self.hosts if host.asked is not None}
        if not asked:
            return
        ready, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        errors = self.ray.exceptions
        for reference in ready:
            host = asked[reference]
            host.asked = None
            try:
                yield host, self.ray.get(reference)
            except errors.ActorUnavailableError:  # it may come back
                if not host.has_begun:  # nobody knows whether the call has arrived
                    self._ask_to_begin(host)
            except errors.RayActorError:
                self._lose(host, "is lost")
            except errors.RayTaskError as error:
                host.code = UserError.exit_code
                self.refusal = f"{host.name} cannot start the command: {first_line(error.cause)}"
            except errors.RayError:  # the answer is lost, and with it whether the call has arrived
                if not host.has_begun:
                    self._ask_to_begin(host)
                raise

    def _lose(self, host: _Host, how: str) -> None:
        host.is_lost = True
        self._say(f"ray: {host.name} {how}")

    def _say(self, news: str) -> None:
        """Say something on a line of its own."""
        self.said.append("\n" * self.is_within_a_line + news + "\n")
        self.is_within_a_line = False

    def _start(self) -> None:
        self._say(f"ray: life {self.number}, on {self.addresses()}")
        self.phase = STARTED
        for host in self.hosts:
            self._ask_to_begin(host)

    def _ask_to_begin(self, host: _Host) -> None:
        """Ask a host for its place; once all places are known, to start its command."""
        if self.phase == MEETING:
            host.asked = host.actor.place.remote()
            return
        places = [(one.address, one.port) for one in self.hosts]
        variables = variables_of(self.job, self.variables[VARIABLE], host.number, places, self.number)
        host.asked = host.actor.start.remote(
            command_of(self.job),
            "" if self.job.copies else f"{self.job.engine_folder}/host.{host.number}.log",
            self.job.started_in,
            {**self.variables, **variables},
            LAUNCHER_VARIABLES,
            self.number,
            host.number == 0,
        )

    def _read_news(self) -> None:
        for host, news in self._answers():
            if news is None:
                host.has_begun = True
                continue
            text, host.code, draining = news
            if text:
                line_end = "" if host.code is None or text.endswith(b"\n") else "\n"
                self.said.append(self.decode(text) + line_end)
                self.is_within_a_line = not self.said[-1].endswith("\n")
            if (leaving := [one for one in self.hosts if one.node in draining]) and not self.is_preempted:
                self.is_preempted = True
                self._say(f"ray: the node of {leaving[0].name} is draining: the run saves and ends")
        for host in self.hosts:
            if not host.is_over and host.asked is None:
                host.asked = host.actor.news.remote()

    def _end_what_remains(self) -> None:
        """End hosts that have nobody left to train with."""
        remaining = [host for host in self.hosts if not host.is_over]
        if not self.hosts or not remaining:
            return
        is_lost = any(host.is_lost for host in self.hosts)
        is_refused = any(host.code == UserError.exit_code for host in self.hosts)
        if self.ends_since is None and (is_lost or self.is_preempted or is_refused or self.hosts[0].is_over):
            self.ends_since = self.clock()
            if is_lost or self.is_preempted:
                self.signal(signal.SIGTERM)
        if self.ends_since is not None and self.clock() - self.ends_since > self.job.grace_s + SLACK_S:
            for host in remaining:
                host.actor.kill.remote()
                self._lose(host, f"has not ended within {self.job.grace_s:g} s, and is killed")

    def signal(self, number: int) -> None:
        """Send a signal to the commands of all hosts."""
        for host in self.hosts:
            if not host.is_over:
                host.actor.signal.remote(number)

    @property
    def is_over(self) -> bool:
        return bool(self.hosts) and all(host.is_over for host in self.hosts)

    @property
    def code(self) -> int:
        """The exit code of an ended life: that of host 0; where it is lost, the worst of the others."""
        codes = [host.code for host in self.hosts if host.code is not None]
        if UserError.exit_code in codes:
            return UserError.exit_code
        first = self.hosts[0].code
        return first if first is not None else max(codes, default=0) or 1

    def addresses(self) -> str:
        return ", ".join(host.address for host in self.hosts)

    def close(self) -> None:
        """Give the nodes back; what is still there is killed."""
        self.groups.remove_placement_group(self.group)


class RayJob(Handle):
    """A job on a Ray cluster to which this process is connected; it ends with this process.

    Args:
        ray: Ray's module. bundle: what one host reserves. variables: for all hosts, the secret among them.
    """

    def __init__(
        self,
        ray: Any,
        job: Job,
        bundle: Bundle,
        variables: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.ray, self.job, self.bundle, self.variables = ray, job, bundle, variables
        self.clock, self.sleep = clock, sleep
        ray.cloudpickle.register_pickle_by_value(ray_hosts)
        self.name = f"Ray job {ray.get_runtime_context().get_job_id()}"
        self.cancels, self.log = "Ctrl-C here", f"{job.engine_folder}/host.0.log"
        if job.copies:
            self.log = f"{job.folder}/workerlog.0"
        self.losses = self.preemptions = 0
        self.has_to_leave = self.is_hurried = False
        self.ended: State | None = None
        self.said: list[str] = []
        self.life = _Life(self, 0)

    def state(self) -> State:
        try:
            return self._advance()
        except (ConnectionError, self.ray.exceptions.RayError) as error:
            raise Unreachable(first_line(error)) from error

    def _advance(self) -> State:
        if self.ended is not None:
            return self.ended
        life = self.life
        life.advance()
        self._take_lines()
        if life.is_over:
            life.close()
            if not self._comes_again(life):
                self.ended = State(ENDED, self._reason(life), life.code)
                return self.ended
            self.said.append(f"ray: life {life.number} ended with exit code {life.code}; the hosts are placed again\n")
            life = self.life = _Life(self, life.number + 1)
        if life.phase != STARTED:
            return State(REQUEUED if life.number else PENDING, life.waits_for())
        return State(RUNNING, life.addresses())

    def _take_lines(self) -> None:
        self.said += self.life.said
        self.life.said = []

    def _comes_again(self, life: _Life) -> bool:
        """Whether the run is to go on in another life; counts why."""
        if self.has_to_leave or life.code in (0, UserError.exit_code):
            return False
        if life.is_preempted or (life.code == RunPreempted.exit_code and not any(h.is_lost for h in life.hosts)):
            self.preemptions += 1
            return self.job.max_preemptions is None or self.preemptions <= self.job.max_preemptions
        if any(host.is_lost for host in life.hosts):
            self.losses += 1
            return self.losses <= self.job.max_restarts
        return False

    def _reason(self, life: _Life) -> str:
        if not life.code:
            return ""
        lost = [f"{host.name} is lost" for host in life.hosts if host.is_lost]
        failed = failed_hosts(self.job.engine_folder, {host.number: host.code for host in life.hosts})
        return life.refusal or "; ".join([*lost, *failed][:3])

    def lines(self) -> Iterator[str]:
        said, self.said = self.said, []
        yield from said

    def signal(self, number: int) -> None:
        self.has_to_leave = True
        if self.life.phase == STARTED:
            self.life.signal(number)
        else:
            self._leave(RunPreempted.exit_code)

    def cancel(self) -> None:
        """End the hosts by SIGTERM, and those that are left after their grace by SIGKILL."""
        self.has_to_leave = True
        until = self.clock() + self.job.grace_s + SLACK_S
        if self.life.phase == STARTED:
            self.life.signal(signal.SIGTERM)
            while not self.is_hurried and self.state().phase != ENDED and self.clock() < until:
                self.sleep(CANCEL_POLL_S)
        self._leave(Interrupted.exit_code)

    def hurry(self) -> None:
        self.is_hurried = True

    def _leave(self, code: int) -> None:
        if self.ended is None:
            self.ended = State(ENDED, "", code)
            self.life.close()
