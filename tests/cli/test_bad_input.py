"""Wrong input gets one sentence with the key, the reason and what to type; exit code 2; nothing is written."""

from __future__ import annotations

import importlib.util
import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.pictures import cifar, image_folder, mnist
from tests.runs import environment
from trainer.config.instantiate import locate
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.planning.processes import check_devices

DIGITS = "+recipe=digits_lenet"
CONFTEST = Path(__file__).with_name("conftest.py")


@dataclass(frozen=True)
class Case:
    """What is typed, what the sentence must say, and what it must tell to type instead."""

    typed: str
    says: tuple[str, ...]
    instead: str = ""


def digits(typed: str, *says: str, instead: str = "") -> Case:
    """A case that adds overrides to the digits recipe; the sentence begins with the (first) override."""
    return Case(f"{DIGITS} {typed}", says, instead)


NAMES = [
    Case("+recipe=digits_lenett", ("+recipe=digits_lenett", "no such recipe", "resnet50_flowers"), DIGITS),
    Case("recipe=digits_lenet", ("recipe=digits_lenet", "with a plus"), DIGITS),
    Case("digits_lenet", ("digits_lenet", "+recipe"), DIGITS),
    Case(f"{DIGITS} +recipe=resnet50_flowers", ("chosen twice", "one option"), "+recipe=resnet50_flowers"),
    Case("", ("no recipe", "--help"), DIGITS),
    Case("model=lenet", ("no data",), "data=OPTION"),
    Case("data=digits", ("no model",), "model=OPTION"),
    Case("model=torchvision data=digits", ("model.name", "has no value"), "model.name=VALUE"),
    digits(
        "optimizer=sgdd",
        "optimizer=sgdd",
        "no such option",
        "adamw, momentum, nesterov, rmsprop, sgd",
        instead="optimizer=sgd",
    ),
    digits("optimizr=sgd", "optimizr=sgd", "no such key", instead="optimizer=sgd"),
    digits("optimizer/foo=sgd", "no such", instead="optimizer=sgd"),
    digits("model@foo=lenet", "model@foo=lenet", instead="model=lenet"),
    digits("epoch=3", "epoch=3", "no such key", instead="epochs=3"),
    digits("lr=0.1", "lr=0.1", "no such key", instead="optimizer.lr=0.1"),
    digits("batch_size=8", "no such key", instead="data.batch_size=8"),
    digits("optimizer.lrr=3", "optimizer.lrr=3", "optimizer=momentum has", instead="optimizer.lr=3"),
    digits("optimizer.lr.foo=3", "optimizer.lr.foo=3", "no such key", instead="optimizer.lr=3"),
    digits("optimizer.rho=3", "optimizer.rho=3", "constructor takes a plus", instead="+optimizer.rho=3"),
    digits(
        "optimizer=sgd optimizer.momentum=0.9",
        "optimizer=sgd has no such key",
        "optimizer=momentum has it",
        instead="optimizer=momentum optimizer.momentum=0.9",
    ),
    digits(
        "strategy=collective strategy.k_steps=2",
        "strategy=collective has no such key",
        "strategy=local_sgd has it",
        instead="strategy=local_sgd strategy.k_steps=2",
    ),
    digits("strategy=collective strategy.bucket_cap=2", "no such key", instead="strategy.bucket_cap_mb=2"),
    digits("+epochs=3", "exists already", "no plus", instead="epochs=3"),
    digits("+optimizer.lr=3", "exists already", "no plus", instead="optimizer.lr=3"),
    digits("+optimizer=sgd", "+optimizer=sgd", "one option", instead="optimizer=sgd"),
    digits("++optimizer=sgd", "optimizer=sgd", "one option"),
    digits("+foo=1", "foo=1", "no such key", "--help"),
    digits("+epoch=1", "epoch=1", "no such key", instead="epochs=1"),
    digits("+sampler.foo=1", "sampler.foo", "no such key", "shuffle, drop_last, pad"),
    digits("+sampler.shufle=1", "no such key", instead="sampler.shuffle=1"),
    digits("data.val_fraction=0.0001", "there are no validation samples", instead="validation=false"),
    digits("+data.foo=1", "data.foo", "no such key", "val_fraction"),
    digits("+strategy.foo=1", "strategy.foo", "no such key", "clip_norm"),
    digits("+scheduler.foo=1", "scheduler.foo", "no such key", "warmup_epochs"),
    digits("tracking.tags.a=3", "not in tracking.tags yet", instead="+tracking.tags.a=3"),
    digits("hydra.run.dirr=x", "hydra.run.dirr=x", "no such key", instead="hydra.run.dir=x"),
    digits("hydra.foo=1", "hydra.foo=1", "no such key"),
    digits("hydra/launcher=foo", "hydra/launcher=foo", "no such option", "basic"),
    digits("~optimizr", "~optimizr", "nothing of that name", instead="optimizer"),
    digits("~model.in_channel", "nothing of that name", instead="~model.in_channels"),
    digits("~epochs", "~epochs", "the run needs this key", instead="epochs=10"),
    digits("~launch", "~launch", "the run needs", instead="launch=OPTION"),
    digits("~data.batch_size", "the run needs this key", instead="data.batch_size=null"),
]

FLAGS = [
    Case(f"{DIGITS} --multrun", ("--multrun", "no such flag"), "--multirun"),
    Case(f"{DIGITS} --recipe=foo", ("--recipe=foo", "no such flag"), "+recipe=foo"),
    Case("--config-dir /nope", ("--config-dir /nope", "no such folder"), "--config-dir FOLDER"),
    Case(f"--config-name nope {DIGITS}", ("--config-name nope", "no nope.yaml"), "--config-name config"),
    Case(f"--config-path /tmp {DIGITS}", ("--config-path",), "--config-dir FOLDER"),
    Case(f"--cfg foo {DIGITS}", ("--cfg", "'foo'", "'job'"), "--help"),
    Case(f"--cfg job -p modell {DIGITS}", ("--package modell", "no such part"), "--package model"),
    Case(f"--cfg job {DIGITS} --info", ("--cfg --info", "do not go together")),
    Case(f"--resolve {DIGITS}", ("--resolve", "goes with --cfg"), "--cfg job --resolve"),
    Case("-sc query=bash", ("COMP_LINE",), "--shell-completion install=bash"),
    Case("-sc install=ksh", ("--shell-completion",), "install=bash"),
    Case("--info", ("no recipe",), DIGITS),
    Case(f"{DIGITS} --plan", ("--plan", "there is no such flag"), "plan=true"),
    Case(f"{DIGITS} --epochs=3", ("--epochs=3", "there is no such flag"), "epochs=3"),
    Case(f"{DIGITS} --lr 0.1", ("--lr 0.1", "there is no such flag"), "optimizer.lr=0.1"),
    Case("--recipe digits_lenet", ("--recipe", "there is no such flag"), "+recipe="),
    Case("--hydra-help foo=3", ("foo", "no such key")),
]

FLEET = [
    Case("--gpus=0,1 train.py", ("--gpus=0,1: there is no such flag",), "launch.nproc=2 (and CUDA_VISIBLE_DEVICES=0,1"),
    Case(
        f"--selected_gpus 0,1,2,3 {DIGITS}",
        ("--selected_gpus 0,1,2,3",),
        "launch.nproc=4 (and CUDA_VISIBLE_DEVICES=0,1,2,3",
    ),
    Case("--gpus", ("--gpus",), "launch.nproc=N (and CUDA_VISIBLE_DEVICES=0,1"),
    Case("--nproc_per_node=4", ("--nproc_per_node=4",), "launch.nproc=4"),
    Case("--nproc-per-node 4", ("--nproc-per-node 4",), "launch.nproc=4"),
    Case(
        "--server_num=1 --worker_num=2 --gpus=0,1 train.py",
        ("--server_num=1 --worker_num=2 --gpus=0,1",),
        "strategy=pserver_async launch.servers=1 launch.workers=2 launch.nproc=2 (and CUDA_VISIBLE_DEVICES=0,1",
    ),
    Case(
        "--ips=10.0.0.1,10.0.0.2 --gpus 0,1",
        ("--ips=10.0.0.1,10.0.0.2",),
        "launch.ips=10.0.0.1,10.0.0.2 launch.nproc=2",
    ),
    Case(
        "--cluster_node_ips=10.0.0.1,10.0.0.2 --node_ip=10.0.0.2 --started_port=6170 --selected_gpus=0,1",
        ("--node_ip: each host finds its own address in launch.ips",),
        "launch.ips=10.0.0.1,10.0.0.2 launch.master_port=6170 launch.nproc=2",
    ),
    Case("--log_dir ./mylog", ("--log_dir ./mylog",), "hydra.run.dir=./mylog"),
    Case(
        "--servers=10.0.0.1:8000,10.0.0.2:8000 --workers=10.0.0.3:8000",
        ("--servers=10.0.0.1:8000,10.0.0.2:8000",),
        (
            "launch.server_endpoints=10.0.0.1:8000,10.0.0.2:8000 launch.role=ROLE launch.rank=N "
            "launch.worker_endpoints=10.0.0.3:8000"
        ),
    ),
    Case("--servers 2 --workers 4", ("--servers 2 --workers 4",), "launch.servers=2 launch.workers=4"),
    Case("--use_paddlecloud train.py", ("--use_paddlecloud:",), "launch.env=paddle"),
    Case("--http_port=8080", ("--http_port: the processes meet without it",)),
    Case(
        "--elastic_server=10.0.0.1:2379",
        ("--elastic_server: the number of processes does not change", "launch.max_restarts"),
    ),
    Case("--heter_worker_num=2", ("--heter_worker_num: there are servers and workers, and no third role",)),
    Case("--heter_workers=10.0.0.1:80", ("--heter_workers: there are servers and workers, and no third role",)),
    Case("--run_mode=ps", ("--run_mode=ps",), "strategy=pserver_async"),
    Case("--run_mode=collective", ("--run_mode=collective",), "strategy=collective"),
    Case(
        "--devices=0,1 --master=10.0.0.1:6170 --rank 1",
        ("--devices=0,1",),
        "launch.nproc=2 launch.master_addr=10.0.0.1 launch.master_port=6170 launch.node_rank=1",
    ),
]

WRITING = [
    digits("seed", "seed", "KEY=VALUE", instead="seed=VALUE"),
    digits("optimizer.lr=[1,2", "optimizer.lr=[1,2", "bracket", instead="optimizer.lr=[1,2]"),
    digits("name=a]b", "name=a]b", "quotes", instead="""'name="a]b"'"""),
    digits("=3", "=3", "no key before", instead="KEY=3"),
    digits("epochs=${", "epochs=${", "${KEY}"),
    digits("data.batch_size=16,32", "data.batch_size=16,32", "sweep", instead="-m data.batch_size=16,32"),
    digits("epochs=range(1,3)", "epochs=range(1,3)", "sweep", instead="-m 'epochs=range(1,3)'"),
    digits(
        "loss.weight={c0:1}",
        "loss.weight={'c0': 1}",
        "in the order of the classes",
        instead="loss.weight=balanced (or loss.weight=[1,",
    ),
    digits("name=${x}", "name=${x}", "no key x", instead="name="),
    digits(
        "name=${oc.env:NOPE_NOT_SET}",
        "name=${oc.env:NOPE_NOT_SET}",
        "no environment variable",
        instead="'name=${oc.env:NOPE_NOT_SET,DEFAULT}'",
    ),
    digits("hydra.run.dir=${x}", "hydra.run.dir=${x}", "no key x"),
    digits("epochs=${foo}", "epochs=${foo}", "no key foo", instead="epochs=10"),
    digits("epochs=${sed}", "no key sed", instead="epochs=${seed}"),
    digits("hydra.run.dir=${foo}", "hydra.run.dir=${foo}", "no key foo"),
    digits("optimizer.lr=${oc.env:NOPE}", "environment variable NOPE", instead="${oc.env:NOPE,DEFAULT}"),
    Case(f"--cfg job --resolve {DIGITS} epochs=${{foo}}", ("epochs=${foo}", "no key foo")),
    Case(f"-m {DIGITS} hydra.job.name=a,b", ("hydra.job.name=a,b", "swept")),
]

VALUES = [
    digits("epochs=ten", "epochs=ten", "whole number of epochs", instead="epochs=12"),
    digits("epochs=2.5", "epochs=2.5", "whole number", instead="epochs=12"),
    digits("epochs=null", "epochs=null", "not null", instead="epochs=12"),
    digits("epochs=[1,2]", "epochs=[1,2]", "whole number"),
    digits("epochs={a:1}", "epochs={a:1}", "whole number"),
    digits("compile=maybe", "compile=maybe", "true or false", instead="compile=false"),
    digits("name=null", "name=null", "not null"),
    digits("optimizer.lr=fast", "optimizer.lr=fast", "a number"),
    digits("optimizer.weight_decay=null", "optimizer.weight_decay=null", "not null"),
    digits("optimizer=adam optimizer.betas=3", "optimizer.betas=3", "a list", instead="optimizer.betas=[0.9,0.999]"),
    digits("model.num_classes=abc", "model.num_classes=abc", "whole number of classes"),
    digits("tracking.tags=3", "tracking.tags=3", "mapping"),
    digits("strategy.gradient_merge=3", "holds the keys", instead="strategy.gradient_merge.k_steps=VALUE"),
    digits("launch=[1,2]", "launch=[1,2]", "option of launch", instead="launch=local"),
    digits("launch=null", "launch=null", "option of launch", instead="launch=local"),
    digits("optimizer=3", "optimizer=3", "option of optimizer: adagrad, adagrad_reference, adam"),
    digits("data.batch_size=0", "data.batch_size=0", "at least 1 sample", instead="data.batch_size=32"),
    digits("data.batch_size=-4", "at least 1 sample"),
    digits("epochs=0", "epochs=0", "at least 1 epoch"),
    digits("seed=-1", "seed=-1", "at least 0", instead="seed=0"),
    digits("optimizer.lr=0", "optimizer.lr=0.0", "greater than 0"),
    digits("optimizer.lr=nan", "optimizer.lr=nan", "finite"),
    digits("optimizer.lr=inf", "optimizer.lr=inf", "finite"),
    digits("strategy.clip_norm=-1", "strategy.clip_norm=-1", "greater than 0", instead="strategy.clip_norm=null"),
    digits("strategy.gradient_merge.k_steps=0", "at least 1 batch"),
    digits("launch.master_port=70000", "at most 65535", instead="launch.master_port=29500"),
    digits("precision=fp8", "precision=fp8", "auto, fp64, fp32, bf16, fp16", instead="precision=auto"),
    digits("precision=bfloat16", "precision=bfloat16", instead="precision=bf16"),
    digits("device=gpu", "device=gpu", "auto, cpu, cuda", instead="device=cuda"),
    digits("mode=evaluate", "one of train, eval, predict", instead="mode=eval"),
    digits("mode=eval", "mode=eval", "needs weights", instead="weights=PATH"),
    digits("mode=eval weights=.", "no model.safetensors"),
    digits("mode=predict", "mode=predict", "needs weights", instead="weights=PATH"),
    digits("mode=eval weights=x profile=true", "profile=true", "mode=eval makes none", instead="profile=false"),
    digits("weights=x", "weights=x", "mode=train does not take it", instead="mode=eval"),
    digits("predict.input=x", "predict.input=x", "mode=train does not take it", instead="mode=predict"),
    digits("mode=eval weights=x predict.input=y", "predict.input=y", "mode=eval does not take it"),
    digits("mode=eval weights=nowhere", "weights=nowhere", "no such file or folder"),
    digits(f"mode=eval weights={CONFTEST}", "none of the kinds", instead="weights=model.safetensors"),
    digits("predict=file", "predict=file", "no such option", instead="predict=folder"),
    digits("predict.inputs=x", "predict.inputs=x", "no such key", instead="predict.input=x"),
    digits("data.pin_memory=perhaps", "auto, true, false", instead="data.pin_memory=auto"),
]

ARGUMENTS = [
    digits(
        "seed=99999999999999999999999", "seed=99999999999999999999999", "at most 9223372036854775807", instead="seed=0"
    ),
    digits(
        "optimizer=adam optimizer.betas=[0.9]",
        "optimizer.betas=[0.9]",
        "2 numbers, not 1",
        instead="optimizer.betas=[0.9,0.999]",
    ),
    digits(
        "optimizer=adam optimizer.betas=[0.9,1]",
        "holds 1.0, and each item must be less than 1",
        instead="optimizer.betas=[0.9,0.999]",
    ),
    digits(
        "optimizer=torch optimizer.name=NAdam +optimizer.betas=[0.9]",
        "optimizer.betas=[0.9]",
        "list index out of range",
    ),
    digits("optimizer=torch optimizer.name=ASGD +optimizer.t0=abc", "optimizer.t0=abc", "an update with it fails"),
    digits("+loss.weight=[1,2]", "loss.weight=", "2 weights for 10 classes"),
    digits("+loss.reduction=summ", "loss.reduction=summ", "not a valid value"),
    digits("name=", "name=", "must not be empty", instead="name=digits_lenet"),
    digits("name=../../evil", "name=../../evil", "below outputs/", instead="name=evil"),
    digits(
        "tracking.uri=foo://x",
        "tracking.uri=foo://x",
        "http, https, sqlite",
        instead="tracking.uri=sqlite:///mlflow.db",
    ),
    digits("tracking.experiment=" + "x" * 300, "longer than 256", instead="tracking.experiment=null"),
    digits("+tracking.tags.a,b=1"),
    digits("hydra.run.dir=/proc/x", "hydra.run.dir=/proc/x", "takes no files", instead="hydra.run.dir=ANOTHER_FOLDER"),
    digits(
        "hydra.run.dir=s3://bucket/run",
        "hydra.run.dir=s3://bucket/run",
        "is an address",
        instead="hydra.run.dir=outputs/NAME checkpoint.to=s3://bucket/run",
    ),
    digits("hydra.run.dir=", "hydra.run.dir=", "names no folder", instead="hydra.run.dir=outputs/NAME"),
    digits("hydra.run.dir=null", "hydra.run.dir=null", "not Optional"),
    Case(f"-m {DIGITS} hydra.sweep.dir=/proc/x epochs=1,2", ("hydra.sweep.dir=/proc/x", "takes no files")),
    digits("scheduler=multistep scheduler.milestones=[]", "scheduler.milestones=[]", "a number at least"),
    digits("launch.ips=,", "launch.ips=,", "no address"),
    digits("launch.timeout_s=1e300", "launch.timeout_s=1e+300", "at most 1000000 seconds"),
    digits("launch.nproc=1000000", "launch.nproc=1000000", "at most 4096 processes"),
    digits("execution.threads=1e400", "whole number"),
    digits("launch.master_addr=", "launch.master_addr=", "must not be empty", instead="launch.master_addr=127.0.0.1"),
    digits("data=imagefolder data.root=" + "x" * 300, "cannot be read: File name too long"),
    digits("epochs=" + "9" * 5000, "epochs=999", "too many digits", instead="epochs=1"),
]
TARGETS = [
    digits("model._target_=nopackage.Foo", "no module 'nopackage'"),
    digits(
        "model._target_=trochvision.models.resnet18", "no module", instead="model._target_=torchvision.models.resnet18"
    ),
    digits("model._target_=foo", "package.module.name"),
    digits("loss._target_=3", "package.module.name"),
    digits("loss._target_=null", "not null", instead="torch.nn.CrossEntropyLoss"),
    digits(
        "optimizer._target_=torch.optim.SDG", "torch.optim has no 'SDG'", instead="optimizer._target_=torch.optim.SGD"
    ),
    digits("model._target_=torchvision.models.resnet5O", "has no 'resnet5O'", instead="torchvision.models.resnet50"),
    digits("model._target_=trainer.models.lenet.Lenet", "has no 'Lenet'", instead="trainer.models.lenet.LeNet"),
    digits("loss._target_=torch.nn.CrossEntropy", "has no 'CrossEntropy'", instead="torch.nn.CrossEntropyLoss"),
    digits(
        "strategy._target_=trainer.strategies.builtin.SingelDeclaration",
        "has no 'SingelDeclaration'",
        instead="builtin.SingleDeclaration",
    ),
    digits("+optimizer.foo=1", "optimizer.foo", "torch.optim.SGD takes no such argument", "momentum, dampening"),
    digits("+optimizer.dampenin=0.1", "takes no such argument", instead="+optimizer.dampening=0.1"),
    digits("+model.foo=1", "model.foo", "LeNet takes no such argument", "num_classes, in_channels"),
    digits("+loss.foo=1", "loss.foo", "takes no such argument", "label_smoothing"),
    digits("optimizer._target_=torch.optim.Adam", "optimizer.momentum", "Adam takes no", instead="~optimizer.momentum"),
    digits("data._target_=collections.OrderedDict", "gave a OrderedDict", "not a trainer.data.source.DataSource"),
    digits(
        "strategy._target_=collections.OrderedDict",
        "strategy._target_",
        "not a trainer.strategies.contract.Declaration",
    ),
]

TORCH = [
    digits("model._target_=collections.OrderedDict", "gave a OrderedDict", "not a torch.nn.Module"),
    digits("model._target_=torch.nn.Identity", "has no parameters to train"),
    digits(
        "model._target_=torch.distributed.is_available ~model.num_classes ~model.in_channels ~model.image_size",
        "gave a bool",
    ),
    digits(
        "model._target_=torch.nn.init.xavier_unifrom_",
        "has no 'xavier_unifrom_'",
        instead="torch.nn.init.xavier_uniform_",
    ),
    digits(
        "model=resnet18", "model.image_size", "torchvision.models.resnet18 takes no such argument (~model.image_size"
    ),
    digits("model=resnet18 ~model.image_size +model.foo=1", "model.foo", "takes no such argument"),
    digits("model=torchvision model.name=resnet5O", "model (trainer.models.classifiers.classifier)", "resnet5O"),
    digits("model.image_size=10", "model.image_size=10", "trainer.models.lenet.LeNet", "multiple of 4"),
    digits("optimizer=torch", "optimizer.name", "has no value", instead="optimizer.name=VALUE"),
    digits("optimizer=torch optimizer.name=RMSpropp", "optimizer.name=RMSpropp", instead="optimizer.name=RMSprop"),
    digits("loss._target_=torch.nn.functional.cross_entropy", "loss (", "missing 2 required"),
    digits("loss._target_=torch.Tensor ~loss.label_smoothing", "gave a Tensor", "not a torch.nn.Module"),
    digits("loss._target_=torch.Tensor", "loss.label_smoothing=0.0", "new() received an invalid"),
    digits(
        (
            "optimizer._target_=torch.nn.Linear ~optimizer.lr ~optimizer.weight_decay ~optimizer.momentum "
            "~optimizer.nesterov"
        ),
        "is no torch.optim.Optimizer, which optimizer needs",
    ),
]

SIZES = [
    digits("device=cuda", "device=cuda", "no GPU", instead="device=cpu"),
    digits("strategy=single launch.nproc=2", "2 workers", "one process", instead="strategy=collective"),
    digits("launch.servers=2", "launch.servers=2", "has no servers", instead="launch.servers=null"),
    digits("launch.server_hosts=all", "launch.server_hosts=all", "has no servers", instead="launch.server_hosts=auto"),
    *(
        digits(
            f"plan=true strategy=pserver_async launch.nnodes=3 launch.servers={servers} launch.server_hosts={hosts}",
            f"launch.server_hosts={hosts}",
            why,
            instead=instead,
        )
        for servers, hosts, why, instead in (
            (3, "0,3", "there is no host 3: the last of 3 is host 2", "launch.server_hosts=auto"),
            (3, "host1", "host1 is no host's number", "launch.server_hosts=auto"),
            (3, "-1", "-1 is no host's number", "launch.server_hosts=auto"),
            (3, "0,all", "all is no host's number", "launch.server_hosts=auto"),
            (3, ",", "names no host", "launch.server_hosts=auto"),
            (3, "2,0,2", "names host 2 twice", "launch.server_hosts=2,0"),
            (2, "all", "2 servers cannot be on 3 hosts", "launch.servers=3"),
            (1, "0,1", "1 server cannot be on 2 hosts", "launch.servers=2"),
        )
    ),
    digits(
        "strategy=pserver_sync launch.server_hosts=1",
        "launch.server_hosts=1",
        "there is no host 1: the run has host 0 alone",
        instead="launch.server_hosts=auto",
    ),
    digits(
        "strategy=pserver_sync launch.server_hosts=null",
        "launch.server_hosts=null",
        "must be",
        instead="launch.server_hosts=auto",
    ),
    digits(
        "strategy=pserver_sync launch.server_hosts=[0]", "launch.server_hosts=[0]", instead="launch.server_hosts=auto"
    ),
    digits("launch.nproc=2 launch.workers=3", "launch.nproc=2", "launch.workers=3", instead="launch.nproc=3"),
    digits("launch.nnodes=2 launch.workers=3", "launch.workers=3", "2 hosts", instead="launch.workers=2"),
    digits("launch.nnodes=2 launch.node_rank=2", "launch.node_rank=2", "below 2", instead="launch.node_rank=0"),
    digits("launch.ips=10.255.255.1,10.255.255.2", "launch.ips=10.255.255.1,10.255.255.2", "this host"),
    digits(
        "launch.nproc=3 data.global_batch_size=2",
        "data.global_batch_size=2",
        "3 workers",
        instead="data.global_batch_size=3",
    ),
    digits(
        "data.global_batch_size=2000",
        "data.global_batch_size=2000",
        "1438 training samples",
        "drop_last",
        instead="data.global_batch_size=1438",
    ),
    digits(
        "data.global_batch_size=32 sampler.pad=true",
        "sampler.pad=true",
        "each sample is shared out once",
        instead="sampler.pad=false",
    ),
    digits(
        "data.batch_size=8 data.global_batch_size=32",
        "data.global_batch_size=32",
        "data.batch_size=8",
        instead="data.batch_size=32",
    ),
    digits(
        "data.batch_size=2000",
        "data.batch_size=2000",
        "1438 training samples",
        "drop_last",
        instead="data.batch_size=1438",
    ),
    digits("data.num_classes=5", "data.num_classes=5", "10 classes", instead="data.num_classes=10"),
    digits(
        "data=flowers102 data.root=empty data.download=false data.on_missing=error",
        "data.root=empty",
        "not in empty/flowers-102",
        instead="data.on_missing=embedded",
    ),
]

CTR = "+recipe=wide_and_deep"


def clicks(typed: str, *says: str, instead: str = "") -> Case:
    """A case that adds overrides to the recipe of click rows."""
    return Case(f"{CTR} {typed}", says, instead)


CLICKS = [
    clicks("data=criteo", "data.path", "has no value", instead="data.path=VALUE"),
    clicks(
        "data=criteo data.path=nowhere",
        "data.path=nowhere",
        "no such file, folder or pattern",
        instead="data.path=FILE",
    ),
    clicks("data=criteo data.path=[nowhere/*.gz]", "data.path=nowhere/*.gz", "no such file"),
    clicks("data=criteo data.path=3", "data.path=3", "a text or a list of texts"),
    clicks("model.table_size=100", "model.table_size=100", "data.hash_size", instead="model.table_size=1000001"),
    clicks("model.table_size=0 data.hash_size=2", "model.table_size=0"),
    clicks(f"data=criteo data.path={CONFTEST}", "is not in Criteo's format", "conftest.py:1: 1 field instead of 40"),
    clicks("data.hash_size=0", "data.hash_size=0", "at least 2 ids", instead="data.hash_size=1000001"),
    clicks("data.hash_size=many", "data.hash_size=many", "whole number of ids"),
    clicks("data.hash_size=2.5", "data.hash_size=2.5", "whole number"),
    clicks("data.max_bad_fraction=2", "at most 1", instead="data.max_bad_fraction=0.01"),
    clicks("data.cache=false strategy=single", "data.cache=false", "strategy=single", instead="data.cache=true"),
    clicks(
        "optimizer=momentum",
        "optimizer (torch.optim.SGD, momentum=0.9)",
        "embedding tables",
        instead="optimizer.sparse=adagrad",
    ),
    clicks(
        "optimizer=torch optimizer.name=RMSprop", "optimizer (torch.optim.RMSprop)", instead="optimizer.sparse=adagrad"
    ),
    clicks(
        "optimizer.sparse=adamw",
        "optimizer.sparse=adamw",
        "auto, sgd, adagrad, rowwise_adagrad, adam",
        instead="optimizer.sparse=adam",
    ),
    clicks("model.hidden=[0]", "model.hidden=[0]", "at least 1"),
    clicks("model.hidden=400", "model.hidden=400", "a list"),
    clicks(
        "loss=cross_entropy",
        "loss (torch.nn.CrossEntropyLoss)",
        "mean over samples",
        instead="loss=binary_cross_entropy",
    ),
    clicks(
        "model=lenet ~model.init_scale ~model.table_size", "model (trainer.models.lenet.LeNet)", "does not take samples"
    ),
    clicks("model.sparse_slots=20", "WideAndDeep)", "does not take samples of {'dense': (13,), 'sparse': (26,)}"),
    digits(
        "model=wide_and_deep optimizer=adagrad ~model.image_size", "WideAndDeep)", "does not take samples of (1, 8, 8)"
    ),
    digits("loss=binary_cross_entropy", "loss (torch.nn.BCEWithLogitsLoss)", instead="loss=cross_entropy"),
]

SWEEPS = [
    Case(f"-m {DIGITS} data.batch_size=16,abc", ("data.batch_size=abc", "whole number of samples")),
    Case(
        f"-m {DIGITS} data.batch_size=16,100000",
        ("job", "data.batch_size=100000", "1438 training samples"),
        "data.batch_size=1438",
    ),
    Case(f"-m {DIGITS} optimizer=sgd,sgdd", ("optimizer=sgdd", "no such option"), "optimizer=sgd"),
    Case(f"-m {DIGITS},nope", ("+recipe=nope", "no such recipe")),
    Case(f"-m {DIGITS} epoch=1,2", ("epoch", "no such key"), "epochs"),
]

SERVED = [
    digits("strategy=pserver_asinc", "no such option", "pserver_async", instead="strategy=pserver_async"),
    digits("strategy=pserver", "no such option"),
    digits("strategy=pserver_sync strategy.k_steps=4", "strategy=pserver_sync has no such key", "has it"),
    digits("strategy=pserver_geo strategy.k_steps=0", "strategy.k_steps=0", "at least 1", instead="strategy.k_steps=1"),
    digits("strategy=pserver_ssp strategy.staleness=-1", "strategy.staleness=-1", "at least 0"),
    digits("strategy=pserver_async launch.servers=0", "launch.servers=0", "at least 1", instead="launch.servers=1"),
    digits("strategy=pserver_async strategy.send_queue_size=0", "send_queue_size", "at least 1"),
    digits("strategy=pserver_async strategy.wire=fp8", "one of full, bf16, int8"),
    digits(
        "strategy=pserver_async strategy.split_method=roundrobin",
        "one of round_robin, hash_name",
        instead="strategy.split_method=round_robin",
    ),
    digits("strategy=pserver_async strategy.entry.probability=0", "entry.probability", "greater than 0"),
    digits("strategy=pserver_async precision=fp16", "precision=fp16", "no loss scale", instead="precision=bf16"),
    digits("strategy=pserver_async optimizer=torch optimizer.name=Adafactor", "Adafactor"),
    digits("strategy=pserver_sync optimizer=torch optimizer.name=Muon", "Muon"),
    digits(
        "strategy=pserver_sync data.work=leased", "data.work=leased", "split beforehand", instead="data.work=static"
    ),
    digits("launch.nproc=2 data.work=leased", "data.work=leased", "strategy=collective", instead="data.work=static"),
    digits("strategy=pserver_async data.work=given", "one of auto, static, leased"),
    digits("strategy=pserver_async data.on_lost_worker=stop", "one of take_over, drop"),
    digits("strategy=pserver_sync strategy.on_lost_worker=drop", "one of stop, continue"),
    digits("strategy=pserver_async execution.val_every_steps=5", "val_every_steps=5", "no common step"),
    digits(
        "strategy=pserver_async strategy.delay_compensation=0.1 strategy.max_merge_var_num=2",
        "delay_compensation",
        "strategy.max_merge_var_num=1",
    ),
    digits(
        "strategy=pserver_async strategy.send_wait_times=2",
        "strategy.send_wait_times=2",
        "waits for no more",
        instead="strategy.max_merge_var_num=3",
    ),
    digits(
        "strategy=pserver_geo strategy.entry.count=2",
        "strategy.entry.count=2",
        "rows of their own",
        instead="strategy=pserver_async",
    ),
    digits(
        "strategy=pserver_geo strategy.entry.probability=0.5",
        "strategy.entry.probability=0.5",
        "rows of their own",
        instead="strategy=pserver_async",
    ),
    digits(
        "strategy=pserver_geo strategy.evict_after=10",
        "strategy.evict_after=10",
        "replicas of the rows",
        instead="strategy=pserver_async",
    ),
    digits(
        "strategy=pserver_sync strategy.evict_by=event_time",
        "strategy.evict_by=event_time",
        "no input called time",
        instead="strategy.evict_by=steps",
    ),
    Case(
        "+recipe=wide_and_deep strategy=pserver_ssp strategy.evict_by=event_time",
        ("strategy.evict_by=event_time", "no input called time"),
        "strategy.evict_by=steps",
    ),
    digits(
        "strategy=pserver_async launch.servers=1025",
        "launch.servers=1025",
        "1024 buckets",
        instead="launch.servers=1024",
    ),
    digits("strategy=pserver_async strategy.load_from=nowhere", "nowhere", "no such folder"),
    Case(
        "+recipe=wide_and_deep strategy=single model.table_size=null data.hash_size=null",
        ("model.table_size=null", "whole tables"),
        "strategy=pserver_async",
    ),
    Case(
        "+recipe=wide_and_deep strategy=single launch.servers=1",
        ("launch.servers=1", "no servers"),
        "launch.servers=null",
    ),
    Case(
        "+recipe=wide_and_deep strategy=pserver_geo optimizer=momentum",
        ("embedding tables", "optimizer.sparse=adagrad"),
    ),
    Case(
        "+recipe=wide_and_deep strategy=pserver_sync data.cache=false",
        ("data.cache=false", "by number"),
        "data.cache=true",
    ),
]
TOGETHER = f"{DIGITS} launch.nproc=2 strategy=collective"
KNOBS = [
    Case(
        f"{TOGETHER} strategy.comm_hook=fp8",
        ("strategy.comm_hook=fp8", "none, fp16, bf16, powersgd"),
        "strategy.comm_hook=",
    ),
    digits(
        "strategy=collective strategy.comm_hook=bf16",
        "strategy.comm_hook=bf16",
        "one worker",
        instead="strategy.comm_hook=none",
    ),
    Case(
        f"{TOGETHER} strategy.powersgd.rank=4",
        ("strategy.powersgd.rank=4", "nothing is compressed"),
        "strategy.comm_hook=powersgd",
    ),
    Case(
        f"{TOGETHER} strategy.comm_hook=powersgd strategy.powersgd.rank=0",
        ("strategy.powersgd.rank=0", "1"),
        "strategy.powersgd.rank=",
    ),
    Case(
        f"{TOGETHER} strategy.comm_hook=powersgd strategy.powersgd.start_step=1",
        ("strategy.powersgd.start_step=1", "2"),
        "strategy.powersgd.start_step=",
    ),
    Case(
        f"{TOGETHER} strategy.comm_hook=powersgd max_steps=10",
        ("strategy.powersgd.start_step=10", "max_steps=10", "no gradient"),
        "strategy.powersgd.start_step=2",
    ),
    Case(
        f"{TOGETHER} strategy.comm_hook=powersgd precision=fp16",
        ("precision=fp16", "scale of its own"),
        "precision=bf16",
    ),
    Case(
        f"{TOGETHER} strategy.static_graph=true strategy.gradient_merge.k_steps=2",
        ("strategy.static_graph=true", "gradient merge"),
        "strategy.static_graph=false",
    ),
    Case(
        f"{TOGETHER} strategy.static_graph=true strategy.find_unused_parameters=true",
        ("strategy.find_unused_parameters=true", "finds unused parameters once"),
        "strategy.find_unused_parameters=false",
    ),
    Case(
        "+recipe=wide_and_deep data=synthetic_criteo strategy=collective launch.nproc=2 strategy.comm_hook=bf16",
        ("strategy.comm_hook=bf16", "sparse"),
        "strategy.comm_hook=none",
    ),
    digits("profile=yes_please", "profile=yes_please", "true or false", instead="profile="),
    digits(
        "profile=true execution.profile_steps=0",
        "execution.profile_steps=0",
        "at least 1",
        instead="execution.profile_steps=5",
    ),
    digits(
        "launch.ips=240.0.0.1,240.0.0.2",
        "launch.ips=240.0.0.1,240.0.0.2",
        "none of these addresses is this host's (its own is ",
        instead="this command on those hosts, or launch.ips with ",
    ),
    digits("launch.nnodes=2 launch.node_rank=2", "launch.node_rank=2", "below 2", instead="launch.node_rank=0"),
    digits(
        "launch.nnodes=2 launch.master_addr=240.0.0.1",
        "launch.master_addr=240.0.0.1",
        "not this host's address",
        instead="launch.master_addr=",
    ),
    digits("launch.nnodes=2 launch.master_port=99999999", "at most 65535", instead="launch.master_port=29500"),
    digits(
        "launch.nproc=2 launch.master_addr=240.0.0.1 launch.master_port=3000",
        "not this host's address",
        instead="launch.master_addr=127.0.0.1",
    ),
]

OPTIMIZATION = [
    digits("optimizer=nesterof", "no such option", "nesterov, rmsprop", instead="optimizer=nesterov"),
    digits("strategy=pserver_sync optimizer=lbfgs", "optimizer=lbfgs", "several times", instead="optimizer=adam"),
    digits(
        "optimizer=zzzz", "no such option", "any of torch.optim, by optimizer.name=NAME", instead="optimizer=momentum"
    ),
    digits("model=zzzz", "no such option", instead="model=lenet"),
    digits("optimizer=torch optimizer.name=LBFGS", "optimizer.name=LBFGS", "several times", instead="optimizer=adam"),
    digits("optimizer=torch optimizer.name=SparseAdam", "sparse gradients alone", instead="optimizer.sparse=adam"),
    digits(
        "optimizer=torch optimizer.name=Muon",
        "takes matrices alone (2 dimensions), and features.0.weight, features.0.bias",
        "classifier.bias are none",
        instead="optimizer=adamw",
    ),
    digits(
        "optimizer=torch optimizer.name=Rprop optimizer.weight_decay=0.1", "optimizer.weight_decay", "no such argument"
    ),
    digits("optimizer.decay_norms_and_biases=maybe", "true or false"),
    digits("optimizer.lr_factors=3", "a mapping", instead="optimizer.lr_factors={}"),
    digits("optimizer.lr_factors={classifier:fast}", "classifier", "fast"),
    digits(
        "optimizer.lr_factors={classifier:-1}",
        "at least 0 (which freezes)",
        instead="optimizer.lr_factors={classifier: 1}",
    ),
    digits(
        "optimizer.lr_factors={clasifier:2}",
        "no parameter of the model",
        "features, classifier",
        instead="optimizer.lr_factors={classifier: 2.0}",
    ),
    digits("optimizer.lr_factors={features.1:2}", "no parameter of the model has a name like features.1"),
    digits(
        "optimizer.lr_factors={*:0}", "nothing is left to train", instead="optimizer.lr_factors={*: 0, classifier: 1}"
    ),
    digits("optimizer.layer_decay=0", "optimizer.layer_decay=0", "greater than 0"),
    digits("optimizer.layer_decay=1.5", "at most 1"),
    digits("optimizer.lr_scaling=log", "none, linear, sqrt"),
    digits("optimizer.lr_base_batch=0", "at least 1 sample"),
    digits("scheduler=onecycle", "no such option", instead="scheduler=one_cycle"),
    digits("scheduler=multistep scheduler.milestones=[30,20]", "scheduler (trainer.optim.schedules.MultiStep)", "rise"),
    digits("scheduler=one_cycle scheduler.anneal=cosine", "cos, linear", instead="scheduler.anneal=cos"),
    digits("scheduler=one_cycle scheduler.rise=2", "at most 1"),
    digits("scheduler=polynomial scheduler.power=0", "greater than 0", instead="scheduler.power=1"),
    digits(
        "scheduler=plateau scheduler.metric=val/los",
        "scheduler.metric=val/los",
        "val/loss, val/acc1, val/acc5",
        instead="scheduler.metric=val/loss",
    ),
    digits(
        "scheduler=plateau execution.val_every=0",
        "scheduler.metric=val/loss",
        "at the end",
        instead="execution.val_every=1",
    ),
    digits("ema.decay=1.5", "ema.decay=1.5", "less than 1", instead="ema.decay=0.999"),
    digits("resume=true", "resume=true", "says where from", instead="hydra.run.dir=FOLDER resume=auto"),
    digits(
        "resume=auto",
        "resume=auto",
        "the folder has the time in its name",
        instead="hydra.run.dir=outputs/digits_lenet/NAME resume=auto",
    ),
    digits(
        "scheduler._target_=torch.optim.lr_scheduler.StepLR +scheduler.step_size=5 +scheduler.gamma=0.5",
        "scheduler._target_=",
        "counts its steps",
        instead="scheduler=step scheduler.every_epochs=5 scheduler.gamma=0.5",
    ),
    digits(
        "scheduler._target_=torch.optim.lr_scheduler.CyclicLR",
        "scheduler._target_=",
        "counts its steps",
        instead="a class of your own with factor(step)",
    ),
    digits("resume_from=x", "resume_from=x", "resume=auto", "resume=FOLDER"),
    digits("scheduler.warmup_epochs=nan", "finite", instead="scheduler.warmup_epochs=1.0"),
    Case(f"-m {DIGITS} optimizer.lr=0.1,nan epochs=1,2", ("error: optimizer.lr=nan in job 2 (epochs=1): must be",)),
    digits("ema.dekay=0.9", "ema.dekay=0.9", "no such key", instead="ema.decay=0.9"),
    digits("ema=0.9", "ema=0.9", "holds the keys", instead="ema.decay=VALUE"),
    digits("ema={decay:fast}", "decay", "a number"),
    digits("~ema", "the run needs this key", instead="ema.decay=null"),
    digits(
        "strategy=pserver_async ema.decay=0.9",
        "ema.decay=0.9",
        "each worker sees other parameters",
        instead="strategy=pserver_sync",
    ),
    digits("strategy=pserver_geo ema.decay=0.9", "no common row", instead="strategy=pserver_sync"),
    digits("best.metric=acc5", "best.metric=acc5", "val/acc5", instead="best.metric=val/acc5"),
    digits("best.metric=val_ema/acc1", "ema.decay=null", instead="ema.decay=0.999"),
    digits("best.metric=train/loss", "a validation here measures", instead="best.metric=val/loss"),
    digits("early_stop.metric=val/auc", "val/loss, val/acc1, val/acc5", instead="early_stop.metric=val/"),
    digits("early_stop.metric=val/accuracy", "val/loss, val/acc1, val/acc5", instead="early_stop.metric=val/acc1"),
    Case("+recipe=wide_and_deep early_stop.metric=accuracy", ("val/auc, val/acc",), "early_stop.metric=val/acc"),
    digits("early_stop.metric=val/loss early_stop.patience=0", "at least 1 validation"),
    digits("early_stop.metric=val/loss execution.val_every=0", "goes by validations", instead="execution.val_every=1"),
    digits(
        "validation=false early_stop.metric=val/loss",
        "early_stop.metric=val/loss",
        "nothing is validated",
        instead="early_stop.metric=null (or validation=true)",
    ),
    digits(
        "validation=false best.metric=val/acc5",
        "best.metric=val/acc5",
        "goes by validations",
        instead="best.metric=null",
    ),
    digits(
        "validation=false scheduler=plateau",
        "scheduler.metric=val/loss",
        "goes by validations",
        instead="scheduler=cosine",
    ),
    digits(
        "validation=false checkpoint.keep_best=1",
        "checkpoint.keep_best=1",
        "no checkpoint is the best",
        instead="checkpoint.keep_best=0",
    ),
    digits(
        "validation=false limit_val_batches=1",
        "limit_val_batches",
        "nothing is validated",
        instead="limit_val_batches=null",
    ),
    digits(
        "validation=false execution.val_every_steps=1",
        "execution.val_every_steps",
        instead="execution.val_every_steps=null",
    ),
    digits(
        "validation=false +metrics.mine={_target_:torchmetrics.classification.MulticlassF1Score,num_classes:10}",
        "metrics.mine",
        "nothing is validated",
        instead="~metrics.mine",
    ),
    digits("strategy.clip_value=0", "greater than 0"),
    digits(
        "strategy.clip_value=1 strategy.clip_norm=1",
        "strategy.clip_value=1",
        "order would matter",
        instead="strategy.clip_norm=null",
    ),
    digits(
        "strategy=local_sgd strategy.k_steps=1 launch.nproc=2 strategy.clip_value=1",
        "own gradient",
        instead="strategy=collective",
    ),
    digits(
        "+model.zero_init_residual=true",
        "model.zero_init_residual=true",
        "no residual block",
        instead="model.zero_init_residual=false",
    ),
    Case(
        f"model=finetune model.name=resnet18 model.weights={CONFTEST} data=digits +model.zero_init_residual=true",
        ("model.zero_init_residual=true", "would undo"),
        "model.zero_init_residual=false",
    ),
    Case(
        "model=torchvision model.name=vgg11 data=digits model.zero_init_residual=true",
        ("in vgg11 there is no last norm",),
        "model.zero_init_residual=false",
    ),
    Case(
        "+recipe=wide_and_deep strategy=pserver_sync ema.decay=0.9",
        ("ema.decay=0.9", "keeps the rows of embedding in servers"),
        "strategy=collective",
    ),
    Case("+recipe=wide_and_deep early_stop.metric=val/acc1", ("val/loss, val/auc",), "early_stop.metric=val/acc"),
]
CASES = [
    *OPTIMIZATION,
    *SERVED,
    *KNOBS,
    *NAMES,
    *FLAGS,
    *FLEET,
    *WRITING,
    *VALUES,
    *ARGUMENTS,
    *TARGETS,
    *TORCH,
    *SIZES,
    *CLICKS,
    *SWEEPS,
]


def assert_refused(case: Case, code: int, error: str, folder: Path) -> None:
    assert code == 2, error
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for part in case.says:
        assert part in error
    if case.instead:
        assert case.instead in error.partition("Type instead: ")[2], error
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.typed.removeprefix(f"{DIGITS} ")[:100] or "nothing")
def test_wrong_input_is_refused_in_one_sentence(case: Case, run: Run, folder: Path) -> None:
    code, out, error = run(*case.typed.split())
    assert_refused(case, code, error, folder)
    assert out == ""


FOLDER = "+recipe=resnet50_imagefolder model=lenet ~model.zero_init_residual data.root="
NAMED = "+recipe=resnet50_imagefolder ~model.zero_init_residual data.root={made}/good model=torchvision model.name"


def transforms(nodes: str, *says: str, instead: str = "") -> Case:
    """A case of images with these transforms."""
    braced = nodes.replace("{", "{{").replace("}", "}}")
    return Case(f"{FOLDER}{{made}}/good data.transforms=[{braced}]", says, instead)


IMAGES = [
    Case(f"{FOLDER}nowhere", ("data.root=nowhere", "there is no such folder"), "data.root=FOLDER"),
    Case(f"{FOLDER}{{made}}/files", ("data.root=", "has no folders, of which each is a class"), ""),
    Case(f"{FOLDER}{{made}}/empty", ("data.root=", "holds no training images"), ""),
    Case(f"{FOLDER}{{made}}/strange", ("data.root=", "classes that", "does not have: tulip"), "rename"),
    Case(f"{FOLDER}{{made}}/good data.val=tests", ("data.val=tests", "no such folder"), "data.val=FOLDER"),
    Case(f"{FOLDER}{{made}}/good data.num_classes=5", ("data.num_classes=5", "has 3 classes"), "data.num_classes=3"),
    Case(f"{FOLDER}{{made}}/good data.augment=randaugmen", ("data.augment=randaugmen",), "data.augment=randaugment"),
    Case(f"{FOLDER}{{made}}/good data.cache=disk", ("data.cache=disk",), "data.cache="),
    Case(f"{FOLDER}{{made}}/good data.on_bad=ignore", ("data.on_bad=ignore",), "data.on_bad="),
    Case(f"{FOLDER}{{made}}/good data.erasing=2", ("data.erasing=2",), "data.erasing="),
    Case(
        f"{FOLDER}{{made}}/good data.mixup=0.2 loss=squared_error loss.target=class_number",
        ("data.mixup=0.2", "loss.target=class_number does not take"),
        "loss=cross_entropy",
    ),
    Case(
        f"{FOLDER}{{made}}/good data.mixup=0.2 loss=binary_cross_entropy",
        ("data.mixup=0.2", "shares of classes"),
        "loss=cross_entropy",
    ),
    Case(
        f"{FOLDER}{{made}}/good model=convnet data.image_size=32 data.val_size=48",
        ("data.val_size=48: model (trainer.models.convnet.Convnet)", "not of (3, 48, 48) in validation"),
        "data.val_size=32",
    ),
    Case(
        f"{NAMED}=vit_b_32 data.val_size=256",
        ("data.val_size=256: model (", "in validation", "Expected 224 but got 256"),
        "data.val_size=224",
    ),
    Case(
        f"{NAMED}=vit_b_32 data.val_size=256 plan=true device=cuda",
        ("data.val_size=256: model (", "in validation"),
        "data.val_size=224",
    ),
    Case(
        f"{NAMED}=googlenet +model.aux_logits=true",
        ("gives a GoogLeNetOutputs", "one tensor of scores"),
        "model.aux_logits=false",
    ),
    Case(
        f"{NAMED}=x ~model.name model._target_=torchvision.models.inception_v3 data.image_size=299",
        ("gives a InceptionOutputs",),
        "+model.aux_logits=false",
    ),
    Case(
        (
            f"{NAMED}=x ~model.name model._target_=torchvision.models.segmentation.fcn_resnet50 "
            f"+model.weights_backbone=null"
        ),
        ("fcn_resnet50", "gives a OrderedDict", "one tensor of scores"),
        "",
    ),
    Case(f"{NAMED}=fcn_resnet50", ("model.name=fcn_resnet50", "for segmentation"), "model.name=resnet50"),
    transforms(
        "{_target_:torchvision.transforms.v2.ColourJitter}",
        "data.transforms[0]._target_",
        "no 'ColourJitter'",
        instead="v2.ColorJitter",
    ),
    transforms("{_target_:nobody.Jitter}", "data.transforms[0]._target_=nobody.Jitter", "no module 'nobody'"),
    transforms(
        "{_target_:torchvision.transforms.v2.ColorJitter,brightnes:0.4}",
        "data.transforms[0].brightnes",
        "no such argument",
        instead="brightness: 0.4",
    ),
    transforms(
        "{_target_:torchvision.transforms.v2.ColorJitter,hue:3}",
        "data.transforms[0].hue=3",
        "hue values should be between",
    ),
    transforms(
        "ColorJitter",
        "data.transforms[0]=ColorJitter",
        "must be a mapping with a _target_",
        instead="torchvision.transforms.v2.ColorJitter",
    ),
    transforms("{_target_:pathlib.Path}", "data.transforms[0] (pathlib.Path)", "cannot be called with an image"),
    transforms(
        "{_target_:torchvision.transforms.v2.RandomGrayscale},{_target_:torchvision.transforms.v2.RandomCrop,size:16}",
        "data.transforms[1]",
        "gives (3, 16, 16) of uint8 instead of (3, 224, 224)",
    ),
    transforms(
        "{_target_:torchvision.transforms.v2.ConvertImageDtype}",
        "data.transforms[0]",
        "of float32 instead of",
        instead="the device normalises",
    ),
    transforms(
        "{_target_:torchvision.transforms.v2.ToPILImage}", "data.transforms[0]", "gives a Image instead of a tensor"
    ),
    transforms(
        "{_target_:torchvision.transforms.v2.LinearTransformation,transformation_matrix:[[1]],mean_vector:[1]}",
        "data.transforms[0]",
    ),
    Case("+recipe=cifar10_convnet data.transforms=[]", ("data.transforms", "no such key"), ""),
    Case(
        "+recipe=mnist_lenet data.root={made}/mnist",
        ("t10k-images-idx3-ubyte is damaged: of 10 entries it has 9.",),
        "fetch it anew",
    ),
    Case(
        "+recipe=cifar10_convnet data.root={made}/cifar",
        ("1 of 120 labels are wrong", "the first is 11, of image 19 in", "test_batch"),
        "fetch it anew",
    ),
    Case("+recipe=resnet50_imagefolder", ("data.root", "has no value"), "data.root=VALUE"),
    Case("+recipe=mnist_json data.path=no.json.gz", ("data.path=no.json.gz", "no such file"), "mnist.json.gz"),
    Case("+recipe=mnist_json data.path={made}/text.json", ("data.path=", "it breaks off"), ""),
    Case(
        "+recipe=mnist_lenet data.download=false data.on_missing=error data.root=none",
        ("data.root=none", "MNIST is not in"),
        "data.on_missing=embedded",
    ),
    Case(
        "+recipe=cifar10_convnet data.download=false data.on_missing=error data.root=none",
        ("data.root=none", "CIFAR-10 is not in"),
        "data.on_missing=embedded",
    ),
    Case(
        "+recipe=resnet50_imagefolder data=shards data.path=none.tar",
        ("data.path=none.tar", "no such files"),
        "data.path=",
    ),
    digits("loss.weight=[1,2]", "loss.weight=", "2 weights for 10 classes", instead="loss.weight=balanced"),
    digits(
        "loss.weight=[1,1,1,1,1,1,1,1,1,-2]", "loss.weight=", "holds -2", instead="loss.weight=[1,1,1,1,1,1,1,1,1,1]"
    ),
    digits(
        "loss.weight=[1,1,1,1,1,1,1,1,1,nan]", "loss.weight=", "holds nan", instead="loss.weight=[1,1,1,1,1,1,1,1,1,1]"
    ),
    digits(
        "loss.weight=[0,0,0,0,0,0,0,0,0,0]",
        "loss.weight=",
        "all weights are 0",
        instead="loss.weight=[1,1,1,1,1,1,1,1,1,1]",
    ),
    digits(
        "loss.weight=[a,b] plan=true",
        "loss.weight=[a,b]",
        "in the order of the classes",
        instead="loss.weight=balanced",
    ),
    digits("loss.weight=2", "loss.weight=2", "a list with a number for each class", instead="loss.weight=balanced"),
    digits(
        "loss.weight=[0,1,1,1,1,1,1,1,1,1] loss.label_smoothing=0.1",
        "loss.label_smoothing=0.1",
        "weight 0",
        instead="loss.label_smoothing=0.0",
    ),
    digits("+loss.reduction=sum", "loss.reduction=sum", "is the sum over a batch", instead="loss.reduction=mean"),
    digits(
        "sampler=class_balanced sampler.shuffle=false",
        "sampler.shuffle=false",
        "orders the samples by itself",
        instead="sampler.shuffle=true",
    ),
    Case(
        "+recipe=resnet50_random sampler=class_balanced",
        ("sampler=class_balanced", "no samples to choose"),
        "sampler=each_once",
    ),
    digits(
        "sampler.padding=contiguous sampler=class_balanced",
        "sampler.padding=contiguous",
        "sampler=class_balanced does not",
        instead="sampler.padding=strided",
    ),
    digits(
        "sampler.padding=contiguous data.global_batch_size=64",
        "sampler.padding=contiguous",
        "goes with data.batch_size",
        instead="data.batch_size in place of",
    ),
    digits(
        "sampler.padding=contiguous strategy=pserver_async",
        "sampler.padding=contiguous",
        "lease blocks of work",
        instead="data.work=static",
    ),
    digits("sampler.padding=blocks", "sampler.padding=blocks", instead="sampler.padding="),
    digits(
        "data.read=scatter strategy=pserver_sync",
        "data.read=scatter",
        "has no group of workers",
        instead="data.read=each",
    ),
    Case(
        "+recipe=resnet50_finetune data.root={made}/good model.weights=none.pt",
        ("model.weights=none.pt", "no such file"),
        "",
    ),
    Case(
        "+recipe=resnet50_finetune data.root={made}/good model.weights=V9",
        ("model.weights=V9", "IMAGENET1K_V1"),
        "model.weights=DEFAULT",
    ),
    Case("+recipe=resnet50_finetune data.root={made}/good model.name=resnet51", ("model.name=resnet51",), ""),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of pictures, good ones and others."""
    root = tmp_path_factory.mktemp("made")
    image_folder(root / "good", per_class=12)
    image_folder(root / "strange")
    (root / "strange" / "val" / "tulip").mkdir()
    (root / "files").mkdir()
    (root / "files" / "a.jpg").write_text("")
    (root / "empty" / "daisy").mkdir(parents=True)
    (root / "empty" / "rose").mkdir()
    (root / "text.json").write_text("no json")
    images = mnist(root / "mnist") / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-400])
    batch = cifar(root / "cifar") / "cifar-10-batches-py" / "test_batch"
    content = pickle.loads(batch.read_bytes())
    content["labels"][-1] = 11
    batch.write_bytes(pickle.dumps(content, protocol=2))
    return root


@pytest.mark.parametrize("case", IMAGES, ids=lambda case: case.typed)
def test_images_that_cannot_be_trained_on_are_refused(
    case: Case, run: Run, folder: Path, made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    code, _, error = run(*case.typed.format(made=made).split())
    assert_refused(case, code, error, folder)
    assert not (tmp_path / "cache").exists()


DATA_FITS = [
    digits("model.num_classes=5", "model.num_classes=5", "10 classes", instead="model.num_classes=10"),
    digits("model.in_channels=3", "model (trainer.models.lenet.LeNet)", "(1, 8, 8)", "3 channels"),
    digits(
        "loss._target_=torch.nn.MSELoss ~loss.label_smoothing",
        "loss (torch.nn.MSELoss)",
        "labels (N,)",
        instead="loss=cross_entropy",
    ),
    digits(
        (
            "model._target_=torch.nn.Conv2d ~model.num_classes ~model.image_size +model.out_channels=10 "
            "+model.kernel_size=1"
        ),
        "model (torch.nn.Conv2d): makes outputs of ('N', 10, 8, 8)",
        "scores (N, 10)",
    ),
]


@pytest.mark.parametrize("case", DATA_FITS, ids=lambda case: case.typed)
def test_a_model_that_does_not_fit_the_data_is_refused(case: Case, run: Run, folder: Path) -> None:
    assert_refused(case, *run(*case.typed.split())[::2], folder)


OWN_FILES = {
    "broken": ("epochs: [1\nname: x\n", ("recipe/broken.yaml, line 4", "no YAML"), ""),
    "badkey": ("epoch: 3\n", ("epoch (in recipe/badkey.yaml)", "no such key"), "epochs"),
    "badtype": ("epochs: many\n", ("epochs=many (in recipe/badtype.yaml)", "whole number"), "epochs=10"),
    "badoption": (
        "defaults: [{override /data: digits}, {override /model: lenett}]\n",
        ("model=lenett (in +recipe=badoption)",),
        "model=lenet",
    ),
}


@pytest.mark.parametrize("name", OWN_FILES)
def test_mistakes_in_own_files_name_the_file(name: str, run: Run, folder: Path, tmp_path: Path) -> None:
    text, says, instead = OWN_FILES[name]
    head = "# @package _global_\n"
    if "defaults" not in text:
        head += "defaults: [{override /model: lenet}, {override /data: digits}]\n"
    own = tmp_path / "own" / "recipe"
    own.mkdir(parents=True)
    (own / f"{name}.yaml").write_text(head + text)
    case = Case("", says, instead)
    code, _, error = run("--config-dir", str(own.parent), f"+recipe={name}")
    assert_refused(case, code, error, folder)


def test_a_recipe_without_its_package_line_says_so(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("defaults: [{override /model: lenet}, {override /data: digits}]\n")
    code, _, error = run("--config-dir", str(tmp_path), "+recipe=mine")
    assert_refused(Case("", ("+recipe=mine",), "# @package _global_"), code, error, folder)


HEAD = b"# @package _global_\n"
OWN = b"defaults: [{override /model: lenet}, {override /data: digits}]\nmodel: {image_size: 8}\nname: own # caf\xe9\n"
EXTENDS = b"defaults:\n  - digits_lenet\n  - _self_\nname: own\n"
NOT_AS_MEANT = {
    "extends another": (EXTENDS, "does not say that its keys belong to the whole config"),
    "mistyped package": (b"# @package _gobal_\n" + EXTENDS, "does not say that its keys belong to the whole config"),
    "byte order mark": (b"\xef\xbb\xbf" + HEAD + EXTENDS, "byte order mark"),
    "byte order mark, whole": (b"\xef\xbb\xbf" + HEAD + OWN.replace(b"\xe9", b"e"), "byte order mark"),
    "latin-1": (HEAD + OWN, "line 4: a config file is UTF-8"),
    "cp1252": (HEAD + OWN.replace(b"\xe9", b"\x80"), "line 4: a config file is UTF-8"),
    "utf-16": ((HEAD + EXTENDS).decode().encode("utf-16"), "a config file is UTF-8"),
}


@pytest.mark.parametrize("kind", NOT_AS_MEANT)
def test_a_recipe_that_is_not_read_as_it_was_meant_names_its_file_and_the_remedy(
    kind: str, run: Run, folder: Path, tmp_path: Path
) -> None:
    content, says = NOT_AS_MEANT[kind]
    file = tmp_path / "it's own" / "recipe" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    typed = ("--config-dir", str(file.parents[1]), "+recipe=mine", "plan=true")
    code, _, error = run(*typed)
    assert code == 2 and says in error and str(file) in error and error.count("\n") == 1
    remedy = error.rstrip("\n").partition("Type instead: ")[2]
    if remedy == '"# @package _global_" as its first line':
        file.write_bytes(HEAD + content.removeprefix(b"# @package _gobal_\n"))
    else:
        subprocess.run(["bash", "-c", remedy], check=True)
    code, out, error = run(*typed)
    assert code == 0 and "Plan of own" in out, error
    assert list(folder.iterdir()) == [] and list(file.parent.iterdir()) == [file]


def test_a_working_folder_that_was_removed_is_named(run: Run, folder: Path) -> None:
    folder.rmdir()
    code, _, error = run("+recipe=digits_lenet")
    assert code == 2 and "the working folder" in error and "was removed" in error and error.count("\n") == 1
    folder.mkdir()


OWN_MODELS = {
    "typo": (
        "import torch\nclass Net(torch.nn.Linear): pass\n",
        "own_typo.Nett",
        "own_typo has no 'Nett'",
        "own_typo.Net",
    ),
    "syntax": ("class Net(:\n", "own_syntax.Net", "importing own_syntax failed: SyntaxError", ""),
    "missing": ("import nowhere\nclass Net: pass\n", "own_missing.Net", "importing own_missing failed", ""),
    "breaks": ("def net(**k):\n    raise RuntimeError('no weights')\n", "own_breaks.net", "it says: no weights", ""),
}


@pytest.mark.parametrize("name", OWN_MODELS)
def test_mistakes_in_own_models_are_sentences(
    name: str, run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, says, instead = OWN_MODELS[name]
    (tmp_path / f"own_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    code, _, error = run(DIGITS, f"model._target_={target}")
    assert_refused(Case("", (says,), instead), code, error, folder)


def test_a_package_of_an_extra_is_named_with_its_extra(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "timm" else found(name, *rest))
    monkeypatch.setitem(sys.modules, "timm", None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"pip install 'trainer\[timm\]'"):
        locate("timm.create_model")
    monkeypatch.delitem(sys.modules, "timm")
    says = ("model._target_=timm.create_model: needs timm, which is not installed",)
    typed = (DIGITS, "model=timm", "~model.image_size", "model.model_name=resnet10t")
    code, _, error = run(*typed)
    assert_refused(Case("", says, "pip install 'trainer[timm]'"), code, error, folder)


def test_incomplete_flowers_folder_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "flowers-102" / "jpg").mkdir(parents=True)
    code, _, error = run("+recipe=resnet50_flowers", f"data.root={tmp_path}/data", "data.download=false")
    assert_refused(Case("", ("flowers-102 is there but lacks",), "data=embedded_flowers"), code, error, folder)


def test_a_file_that_is_no_gzip_file_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "day_0.gz"
    path.write_text("plain text")
    code, _, error = run(CTR, "data=criteo", f"data.path={path}")
    assert_refused(
        Case("", (f"data.path={path}", "is no gzip file"), f"data.path={tmp_path}/day_0"), code, error, folder
    )


def test_port_in_use_is_refused(run: Run, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, _, error = run(DIGITS, "launch.nproc=2", f"launch.master_port={port}")
    case = Case("", (f"launch.master_port={port}", "is in use"), "launch.master_port=0")
    assert_refused(case, code, error, folder)


def test_more_workers_than_gpus_are_refused() -> None:
    config = RunConfig()
    with pytest.raises(UserError, match=r"launch.nproc=8: this host has 4 GPUs.*Type instead: launch.nproc=4"):
        check_devices(config, "cuda", 8, gpus=4)
    with pytest.raises(UserError, match=r"device=cuda: this machine shows no GPU.*device=cpu"):
        check_devices(config, "cuda", 1, gpus=0)
    check_devices(config, "cuda", 4, gpus=4)
    check_devices(config, "cpu", 64, gpus=0)
    check_devices(RunConfig(plan=True), "cuda", 64, gpus=0)


def test_debug_shows_the_traceback(run: Run) -> None:
    code, _, error = run(DIGITS, "epochs=ten", "debug=true")
    assert code == 2
    assert "Traceback (most recent call last)" in error and "ValidationError" in error
    assert error.splitlines()[-1].startswith("error: epochs=ten: ")


@pytest.mark.parametrize("typed", ["epoch=3", "data.batch_size=0", "launch=[1,2]"])
def test_wrong_input_in_a_real_process(typed: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "trainer", DIGITS, typed]
    done = subprocess.run(argv, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_trainer_run_raises_the_same_sentence(folder: Path) -> None:
    import trainer

    with pytest.raises(UserError, match=r"epoch=3: there is no such key\. Type instead: epochs=3"):
        trainer.run([DIGITS, "epoch=3"])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "/schema/DataConfg@_here_",
            "/schema/DataConfg (in data/mine.yaml): there are no such keys. Type instead: /schema/DataConfig@_here_",
        ),
        (
            "/schema/DataConfig",
            (
                "/schema/DataConfig (in data/mine.yaml): its keys would go to data.schema. Type instead: "
                "/schema/DataConfig@_here_"
            ),
        ),
    ],
)
def test_wrong_schema_of_an_own_option_is_named_with_its_file(line: str, says: str, run: Run, folder: Path) -> None:
    own = folder / "mine" / "data"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(f"defaults:\n  - {line}\n  - _self_\n_target_: trainer.data.sets.digits.Digits\n")
    code, _, errors = run("--config-dir", "mine", DIGITS, "data=mine")
    assert (code, errors) == (2, f"error: {says}\n")
