"""Wrong input gets one sentence with the key, the reason and what to type; exit code 2; nothing is written."""

from __future__ import annotations

import importlib.util
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.pictures import cifar, image_folder, mnist
from tests.refusals import Case, cases
from tests.runs import environment
from trainer.config.instantiate import locate
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.planning.processes import check_devices

DIGITS, CTR = "+recipe=digits_lenet", "+recipe=wide_and_deep"
FOLDER = "+recipe=resnet50_imagefolder model=lenet ~model.zero_init_residual data.root={made}/"
NAMED = "+recipe=resnet50_imagefolder ~model.zero_init_residual data.root={made}/good model=torchvision model.name="


NAMES = """
    +recipe=resnet50_flowers | chosen twice | one option => +recipe=resnet50_flowers
    optimizer=sgdd | optimizer=sgdd | no such option | adamw, lamb, lars, lion, momentum, muon => optimizer=sgd
    optimizr=sgd | optimizr=sgd | no such key => optimizer=sgd
    optimizer/foo=sgd | no such => optimizer=sgd
    model@foo=lenet | model@foo=lenet => model=lenet
    epoch=3 | epoch=3 | no such key => epochs=3
    lr=0.1 | lr=0.1 | no such key => optimizer.lr=0.1
    batch_size=8 | no such key => data.batch_size=8
    optimizer.lrr=3 | optimizer.lrr=3 | optimizer=momentum has => optimizer.lr=3
    optimizer.lr.foo=3 | optimizer.lr.foo=3 | no such key => optimizer.lr=3
    optimizer.rho=3 | optimizer.rho=3 | constructor takes a plus => +optimizer.rho=3
    optimizer=sgd optimizer.momentum=0.9
        optimizer=sgd has no such key | optimizer=momentum has it => optimizer=momentum optimizer.momentum=0.9
    strategy=collective strategy.k_steps=2
        strategy=collective has no such key | strategy=local_sgd has it => strategy=local_sgd strategy.k_steps=2
    strategy=collective strategy.bucket_cap=2 | no such key => strategy.bucket_cap_mb=2
    +epochs=3 | exists already | no plus => epochs=3
    +optimizer.lr=3 | exists already | no plus => optimizer.lr=3
    +optimizer=sgd | +optimizer=sgd | one option => optimizer=sgd
    ++optimizer=sgd | optimizer=sgd | one option
    +foo=1 | foo=1 | no such key | --help
    +epoch=1 | epoch=1 | no such key => epochs=1
    +sampler.foo=1 | sampler.foo | no such key | shuffle, drop_last, pad
    +sampler.shufle=1 | no such key => sampler.shuffle=1
    data.val_fraction=0.0001 | there are no validation samples => validation=false
    +data.foo=1 | data.foo | no such key | val_fraction
    +strategy.foo=1 | strategy.foo | no such key | clip_norm
    +scheduler.foo=1 | scheduler.foo | no such key | warmup_epochs
    tracking.tags.a=3 | not in tracking.tags yet => +tracking.tags.a=3
    hydra.run.dirr=x | hydra.run.dirr=x | no such key => hydra.run.dir=x
    hydra.foo=1 | hydra.foo=1 | no such key
    hydra/launcher=foo | hydra/launcher=foo | no such option => sweep.parallel=2
    ~optimizr | ~optimizr | nothing of that name => optimizer
    ~model.in_channel | nothing of that name => ~model.in_channels
    ~epochs | ~epochs | the run needs this key => epochs=10
    ~launch | ~launch | the run needs => launch=OPTION
    ~data.batch_size | the run needs this key => data.batch_size=null
"""
FLAGS = """
    --multrun | --multrun | no such flag => --multirun
    --recipe=foo | --recipe=foo | no such flag => +recipe=foo
    --plan | --plan | there is no such flag => plan=true
    --epochs=3 | --epochs=3 | there is no such flag => epochs=3
    --lr 0.1 | --lr 0.1 | there is no such flag => optimizer.lr=0.1
"""
WRITING = """
    seed | seed | KEY=VALUE => seed=VALUE
    optimizer.lr=[1,2 | optimizer.lr=[1,2 | bracket => optimizer.lr=[1,2]
    name=a]b | name=a]b | quotes => 'name="a]b"'
    =3 | =3 | no key before => KEY=3
    epochs=${ | epochs=${ | ${KEY}
    data.batch_size=16,32 | data.batch_size=16,32 | sweep => -m data.batch_size=16,32
    epochs=range(1,3) | epochs=range(1,3) | sweep => -m 'epochs=range(1,3)'
    loss.weight={c0:1} | loss.weight={'c0': 1} | in the order of the classes => loss.weight=balanced (or loss.weight=[1,
    name=${x} | name=${x} | no key x => name=
    name=${oc.env:NOPE_NOT_SET}
        name=${oc.env:NOPE_NOT_SET} | no environment variable => 'name=${oc.env:NOPE_NOT_SET,DEFAULT}'
    hydra.run.dir=${x} | hydra.run.dir=${x} | no key x
    epochs=${foo} | epochs=${foo} | no key foo => epochs=10
    epochs=${sed} | no key sed => epochs=${seed}
    hydra.run.dir=${foo} | hydra.run.dir=${foo} | no key foo
    optimizer.lr=${oc.env:NOPE} | environment variable NOPE => ${oc.env:NOPE,DEFAULT}
"""
VALUES = """
    epochs=ten | epochs=ten | whole number of epochs => epochs=12
    epochs=2.5 | epochs=2.5 | whole number => epochs=12
    epochs=null | epochs=null | not null => epochs=12
    epochs=[1,2] | epochs=[1,2] | whole number
    epochs={a:1} | epochs={a:1} | whole number
    compile=maybe | compile=maybe | auto, true, false => compile=false
    name=null | name=null | not null
    optimizer.lr=fast | optimizer.lr=fast | a number
    optimizer.weight_decay=null | optimizer.weight_decay=null | not null
    optimizer=adam optimizer.betas=3 | optimizer.betas=3 | a list => optimizer.betas=[0.9,0.999]
    model.num_classes=abc | model.num_classes=abc | whole number of classes
    tracking.tags=3 | tracking.tags=3 | mapping
    strategy.gradient_merge=3 | holds the keys => strategy.gradient_merge.k_steps=VALUE
    launch=[1,2] | launch=[1,2] | option of launch => launch=local
    launch=null | launch=null | option of launch => launch=local
    optimizer=3 | optimizer=3 | option of optimizer: adagrad, adagrad_reference, adam
    data.batch_size=0 | data.batch_size=0 | at least 1 sample => data.batch_size=32
    data.batch_size=-4 | at least 1 sample
    epochs=0 | epochs=0 | at least 1 epoch
    seed=-1 | seed=-1 | at least 0 => seed=0
    optimizer.lr=0 | optimizer.lr=0.0 | greater than 0
    optimizer.lr=nan | optimizer.lr=nan | finite
    optimizer.lr=inf | optimizer.lr=inf | finite
    strategy.clip_norm=-1 | strategy.clip_norm=-1 | greater than 0 => strategy.clip_norm=null
    strategy.gradient_merge.k_steps=0 | at least 1 batch
    launch.master_port=70000 | at most 65535 => launch.master_port=29500
    precision=fp8 | precision=fp8 | auto, fp64, fp32, bf16, fp16 => precision=auto
    precision=bfloat16 | precision=bfloat16 => precision=bf16
    device=gpu | device=gpu | auto, cpu, cuda => device=cuda
    mode=evaluate | one of train, eval, predict => mode=eval
    mode=eval | mode=eval | needs weights => weights=PATH
    mode=eval weights=. | no model.safetensors
    mode=predict | mode=predict | needs weights => weights=PATH
    mode=eval weights=x profile=true | profile=true | mode=eval makes none => profile=false
    weights=x | weights=x | mode=train does not take it => mode=eval
    predict.input=x | predict.input=x | mode=train does not take it => mode=predict
    mode=eval weights=x predict.input=y | predict.input=y | mode=eval does not take it
    mode=eval weights=nowhere | weights=nowhere | no such file or folder
    predict=file | predict=file | no such option => predict=folder
    predict.inputs=x | predict.inputs=x | no such key => predict.input=x
    data.pin_memory=perhaps | auto, true, false => data.pin_memory=auto
"""
ARGUMENTS = """
    seed=99999999999999999999999 | seed=99999999999999999999999 | at most 9223372036854775807 => seed=0
    optimizer=adam optimizer.betas=[0.9] | optimizer.betas=[0.9] | 2 numbers, not 1 => optimizer.betas=[0.9,0.999]
    optimizer=adam optimizer.betas=[0.9,1] | holds 1.0, and each item must be less than 1 => optimizer.betas=[0.9,0.999]
    optimizer=torch optimizer.name=NAdam +optimizer.betas=[0.9] | optimizer.betas=[0.9] | list index out of range
    optimizer=torch optimizer.name=ASGD +optimizer.t0=abc | optimizer.t0=abc | an update with it fails
    +loss.weight=[1,2] | loss.weight= | 2 weights for 10 classes
    +loss.reduction=summ | loss.reduction=summ | not a valid value
    name= | name= | must not be empty => name=digits_lenet
    name=../../evil | name=../../evil | below outputs/ => name=evil
    tracking.uri=foo://x | tracking.uri=foo://x | http, https, sqlite => tracking.uri=sqlite:///mlflow.db
    tracking.experiment={long} tracking.experiment={long}
        longer than 256 => tracking.experiment=null
    +tracking.tags.a,b=1
    hydra.run.dir=/proc/x | hydra.run.dir=/proc/x | takes no files => hydra.run.dir=ANOTHER_FOLDER
    hydra.run.dir=s3://bucket/run
        hydra.run.dir=s3://bucket/run | is an address => hydra.run.dir=outputs/NAME checkpoint.to=s3://bucket/run
    hydra.run.dir= | hydra.run.dir= | names no folder => hydra.run.dir=outputs/NAME
    hydra.run.dir=null | hydra.run.dir=null | not Optional
    scheduler=multistep scheduler.milestones=[] | scheduler.milestones=[] | a number at least
    launch.ips=, | launch.ips=, | no address
    launch.timeout_s=1e300 | launch.timeout_s=1e+300 | at most 1000000 seconds
    launch.nproc=1000000 | launch.nproc=1000000 | at most 4096 processes
    execution.threads=1e400 | whole number
    launch.master_addr= | launch.master_addr= | must not be empty => launch.master_addr=127.0.0.1
    data=imagefolder data.root={long}
        cannot be read: File name too long
    mode=eval weights={file} | none of the kinds => weights=model.safetensors
    epochs={long number} | epochs=999 | too many digits => epochs=1
"""
TARGETS = """
    model._target_=nopackage.Foo | no module 'nopackage'
    model._target_=trochvision.models.resnet18 | no module => model._target_=torchvision.models.resnet18
    model._target_=foo | package.module.name
    loss._target_=3 | package.module.name
    loss._target_=null | not null => torch.nn.CrossEntropyLoss
    optimizer._target_=torch.optim.SDG | torch.optim has no 'SDG' => optimizer._target_=torch.optim.SGD
    model._target_=torchvision.models.resnet5O | has no 'resnet5O' => torchvision.models.resnet50
    model._target_=trainer.models.lenet.Lenet | has no 'Lenet' => trainer.models.lenet.LeNet
    loss._target_=torch.nn.CrossEntropy | has no 'CrossEntropy' => torch.nn.CrossEntropyLoss
    strategy._target_=trainer.strategies.builtin.SingelDeclaration
        has no 'SingelDeclaration' => builtin.SingleDeclaration
    +optimizer.foo=1 | optimizer.foo | torch.optim.SGD takes no such argument | momentum, dampening
    +optimizer.dampenin=0.1 | takes no such argument => +optimizer.dampening=0.1
    +model.foo=1 | model.foo | LeNet takes no such argument | num_classes, in_channels
    +loss.foo=1 | loss.foo | takes no such argument | label_smoothing
    optimizer._target_=torch.optim.Adam | optimizer.momentum | Adam takes no => ~optimizer.momentum
    data._target_=collections.OrderedDict | gave a OrderedDict | not a trainer.data.source.DataSource
    strategy._target_=collections.OrderedDict | strategy._target_ | not a trainer.strategies.contract.Declaration
"""
TORCH = """
    model._target_=collections.OrderedDict | gave a OrderedDict | not a torch.nn.Module
    model._target_=torch.nn.Identity | has no parameters to train
    model._target_=torch.distributed.is_available ~model.num_classes ~model.in_channels ~model.image_size | gave a bool
    model._target_=torch.nn.init.xavier_unifrom_ | has no 'xavier_unifrom_' => torch.nn.init.xavier_uniform_
    model=resnet18 | model.image_size | torchvision.models.resnet18 takes no such argument (~model.image_size
    model=resnet18 ~model.image_size +model.foo=1 | model.foo | takes no such argument
    model=torchvision model.name=resnet5O | model (trainer.models.classifiers.classifier) | resnet5O
    model.image_size=10 | model.image_size=10 | trainer.models.lenet.LeNet | multiple of 4
    optimizer=torch | optimizer.name | has no value => optimizer.name=VALUE
    optimizer=torch optimizer.name=RMSpropp | optimizer.name=RMSpropp => optimizer.name=RMSprop
    loss._target_=torch.nn.functional.cross_entropy | loss ( | missing 2 required
    loss._target_=torch.Tensor ~loss.label_smoothing | gave a Tensor | not a torch.nn.Module
    loss._target_=torch.Tensor | loss.label_smoothing=0.0 | new() received an invalid
    optimizer._target_=torch.nn.Linear ~optimizer.lr ~optimizer.weight_decay ~optimizer.momentum ~optimizer.nesterov
        is no torch.optim.Optimizer, which optimizer needs
    loss=binary_cross_entropy | loss (torch.nn.BCEWithLogitsLoss) => loss=cross_entropy
    model=wide_and_deep optimizer=adagrad ~model.image_size | WideAndDeep) | does not take samples of (1, 8, 8)
"""
SIZES = """
    device=cuda | device=cuda | no GPU => device=cpu
    strategy=single launch.nproc=2 | 2 workers | one process => strategy=collective
    recompute=auto | recompute=auto | no blocks that come again => the name or class of modules
    recompute=Block | recompute=Block | no module of the model has this name or class => recompute=auto
    recompute=Sequential compile=true | compile=true | the compiler decides itself => compile=false
    strategy=sharded launch.nproc=2 strategy.wrap=layer9 | strategy.wrap=layer9 | no module => strategy.wrap=auto
    strategy=sharded | strategy=sharded | nobody to share the model with => launch.nproc=2
    strategy=sharded launch.nproc=4 strategy.shard_group=3
        strategy.shard_group=3 | do not make groups of 3 => strategy.shard_group=2
    strategy=sharded launch.nproc=2 compile=true | compile=true | compile as one => compile=false
    strategy=sharded launch.nproc=2 strategy.offload=true | strategy.offload=true | without a GPU
    strategy=sharded launch.nproc=2 strategy.reduce_dtype=fp16 precision=bf16
        strategy.reduce_dtype=fp16 | overflows => strategy.reduce_dtype=bf16
    strategy=sharded launch.nproc=2 strategy.shard=optimizer strategy.wrap=Block
        strategy.wrap=Block | the model is whole on each worker => strategy.wrap=auto
    strategy=sharded launch.nproc=2 strategy.find_unused_parameters=true
        strategy.find_unused_parameters=true | with strategy.shard=parameters => strategy.find_unused_parameters=false
    strategy=sharded launch.nproc=2 strategy.shard=optimizer optimizer=lamb optimizer.max_grad_norm=1
        strategy.shard=optimizer | Lamb updates a parameter by the gradients of all => strategy.shard=parameters
    launch.servers=2 | launch.servers=2 | has no servers => launch.servers=null
    launch.server_hosts=all | launch.server_hosts=all | has no servers => launch.server_hosts=auto
    plan=true strategy=pserver_async launch.nnodes=3 launch.servers=3 launch.server_hosts=0,3
        launch.server_hosts=0,3 | there is no host 3: the last of 3 is host 2 => launch.server_hosts=auto
    plan=true strategy=pserver_async launch.nnodes=3 launch.servers=3 launch.server_hosts=host1
        launch.server_hosts=host1 | host1 is no host's number => launch.server_hosts=auto
    plan=true strategy=pserver_async launch.nnodes=3 launch.servers=3 launch.server_hosts=-1
        launch.server_hosts=-1 | -1 is no host's number => launch.server_hosts=auto
    plan=true strategy=pserver_async launch.nnodes=3 launch.servers=3 launch.server_hosts=0,all
        launch.server_hosts=0,all | all is no host's number => launch.server_hosts=auto
    plan=true strategy=pserver_async launch.nnodes=3 launch.servers=3 launch.server_hosts=,
        launch.server_hosts=, | names no host => launch.server_hosts=auto
    plan=true strategy=pserver_async launch.nnodes=3 launch.servers=3 launch.server_hosts=2,0,2
        launch.server_hosts=2,0,2 | names host 2 twice => launch.server_hosts=2,0
    plan=true strategy=pserver_async launch.nnodes=3 launch.servers=2 launch.server_hosts=all
        launch.server_hosts=all | 2 servers cannot be on 3 hosts => launch.servers=3
    plan=true strategy=pserver_async launch.nnodes=3 launch.servers=1 launch.server_hosts=0,1
        launch.server_hosts=0,1 | 1 server cannot be on 2 hosts => launch.servers=2
    strategy=pserver_sync launch.server_hosts=1
        launch.server_hosts=1 | there is no host 1: the run has host 0 alone => launch.server_hosts=auto
    strategy=pserver_sync launch.server_hosts=null | launch.server_hosts=null | must be => launch.server_hosts=auto
    strategy=pserver_sync launch.server_hosts=[0] | launch.server_hosts=[0] => launch.server_hosts=auto
    launch.nproc=2 launch.workers=3 | launch.nproc=2 | launch.workers=3 => launch.nproc=3
    launch.nnodes=2 launch.workers=3 | launch.workers=3 | 2 hosts => launch.workers=2
    launch.nnodes=2 launch.node_rank=2 | launch.node_rank=2 | below 2 => launch.node_rank=0
    launch.ips=10.255.255.1,10.255.255.2 | launch.ips=10.255.255.1,10.255.255.2 | this host
    launch.nproc=3 data.global_batch_size=2 | data.global_batch_size=2 | 3 workers => data.global_batch_size=3
    data.global_batch_size=2000
        data.global_batch_size=2000 | 1438 training samples | drop_last => data.global_batch_size=1438
    data.global_batch_size=32 sampler.pad=true | sampler.pad=true | each sample is shared out once => sampler.pad=false
    data.batch_size=8 data.global_batch_size=32 | data.global_batch_size=32 | data.batch_size=8 => data.batch_size=32
    data.batch_size=2000 | data.batch_size=2000 | 1438 training samples | drop_last => data.batch_size=1438
    data.num_classes=5 | data.num_classes=5 | 10 classes => data.num_classes=10
    data=flowers102 data.root=empty data.download=false data.on_missing=error
        data.root=empty | not in empty/flowers-102 => data.on_missing=embedded
"""
SERVED = """
    strategy=pserver_asinc | no such option | pserver_async => strategy=pserver_async
    strategy=pserver | no such option => strategy=NAME
    strategy=geo | no such option => strategy=pserver_geo
    strategy=pserver_sync strategy.k_steps=4 | strategy=pserver_sync has no such key | has it
    strategy=pserver_geo strategy.k_steps=0 | strategy.k_steps=0 | at least 1 => strategy.k_steps=1
    strategy=pserver_ssp strategy.staleness=-1 | strategy.staleness=-1 | at least 0
    strategy=pserver_async launch.servers=0 | launch.servers=0 | at least 1 => launch.servers=1
    strategy=pserver_async strategy.send_queue_size=0 | send_queue_size | at least 1
    strategy=pserver_async strategy.wire=fp8 | one of full, bf16, int8
    strategy=pserver_async strategy.split_method=roundrobin
        one of round_robin, hash_name => strategy.split_method=round_robin
    strategy=pserver_async strategy.entry.probability=0 | entry.probability | greater than 0
    strategy=pserver_async precision=fp16 | precision=fp16 | no loss scale => precision=bf16
    strategy=pserver_async optimizer=torch optimizer.name=Adafactor | Adafactor
    strategy=pserver_sync optimizer=torch optimizer.name=Muon | Muon
    strategy=pserver_sync data.work=leased | data.work=leased | split beforehand => data.work=static
    launch.nproc=2 data.work=leased | data.work=leased | strategy=collective => data.work=static
    strategy=pserver_async data.work=given | one of auto, static, leased
    strategy=pserver_async data.on_lost_worker=stop | one of take_over, drop
    strategy=pserver_sync strategy.on_lost_worker=drop | one of stop, continue
    strategy=pserver_async execution.val_every_steps=5 | val_every_steps=5 | no common step
    strategy=pserver_async strategy.delay_compensation=0.1 strategy.max_merge_var_num=2
        delay_compensation | strategy.max_merge_var_num=1
    strategy=pserver_async strategy.send_wait_times=2
        strategy.send_wait_times=2 | waits for no more => strategy.max_merge_var_num=3
    strategy=pserver_geo strategy.entry.count=2 | strategy.entry.count=2 | rows of their own => strategy=pserver_async
    strategy=pserver_geo strategy.entry.probability=0.5
        strategy.entry.probability=0.5 | rows of their own => strategy=pserver_async
    strategy=pserver_geo strategy.evict_after=10
        strategy.evict_after=10 | replicas of the rows => strategy=pserver_async
    strategy=pserver_sync strategy.evict_by=event_time
        strategy.evict_by=event_time | no input called time => strategy.evict_by=steps
    strategy=pserver_async launch.servers=1025 | launch.servers=1025 | 1024 buckets => launch.servers=1024
    strategy=pserver_async strategy.load_from=nowhere | nowhere | no such folder
"""
KNOBS = """
    launch.nproc=2 strategy=local_sgd strategy.begin=gradients
        strategy.begin=gradients | no gradients are averaged => strategy.begin_step=1000
    launch.nproc=2 strategy=local_sgd strategy.begin=gradients strategy.begin_step=9 on_nonfinite=skip
        on_nonfinite=skip | waiting for its gradients => strategy.begin=parameters
    launch.nproc=2 strategy=local_sgd strategy.adaptive=true strategy.streaming.fragments=2
        strategy.streaming.fragments=2 | the whole model => strategy.adaptive=false
    launch.nproc=2 strategy=local_sgd strategy.streaming.fragments=5
        strategy.streaming.fragments=5 | strategy.k_steps=4 => strategy.streaming.fragments=4
    launch.nproc=2 strategy=local_sgd strategy.streaming.delay=4
        strategy.streaming.delay=4 | before the next one => strategy.k_steps=5
    launch.nproc=2 strategy=local_sgd strategy.exchange=fp8 | full, bf16, int8 => strategy.exchange=
    launch.nproc=2 strategy=collective strategy.comm_hook=fp8
        strategy.comm_hook=fp8 | none, fp16, bf16, powersgd, dgc => strategy.comm_hook=
    launch.nproc=2 strategy=collective strategy.dgc.sparsity=[0.9]
        strategy.dgc.sparsity=[0.9] | nothing is compressed => strategy.comm_hook=dgc
    launch.nproc=2 strategy=collective strategy.comm_hook=dgc optimizer=adam
        strategy.comm_hook=dgc | the momentum of SGD => optimizer=momentum
    launch.nproc=2 strategy=collective strategy.comm_hook=dgc strategy.clip_norm=1
        strategy.clip_norm=1 | the whole gradient => strategy.dgc.clip_norm=1
    launch.nproc=2 strategy=collective strategy.comm_hook=dgc strategy.find_unused_parameters=true
        strategy.find_unused_parameters=true | do not use it => strategy.comm_hook=none
    launch.nproc=2 strategy=collective strategy.comm_hook=dgc on_nonfinite=skip
        on_nonfinite=skip | would spoil the next ones => on_nonfinite=rewind
    launch.nproc=2 strategy=collective strategy.comm_hook=dgc max_steps=10 strategy.dgc.rampup_begin_step=10
        strategy.dgc.rampup_begin_step=10 | no gradient => strategy.dgc.rampup_begin_step=1
    launch.nproc=2 strategy=collective strategy.comm_hook=dgc +optimizer.dampening=0.1
        optimizer.dampening | whole => +optimizer.dampening=0
    strategy=collective strategy.comm_hook=bf16 | strategy.comm_hook=bf16 | one worker => strategy.comm_hook=none
    strategy=collective strategy.comm_streams=2 | one worker => strategy.comm_streams=1
    strategy=pserver_sync strategy.sync_batch_norm=true | strategy=collective has it => strategy=collective
    launch.nproc=4 strategy=collective strategy.reduce_group=3
        strategy.reduce_group=3 | no groups of 3 => strategy.reduce_group=2
    launch.nproc=2 strategy=collective strategy.reduce_group=2
        strategy.reduce_group=2 | no groups of 2 => strategy.reduce_group=null
    launch.nproc=4 strategy=collective strategy.reduce_group=2 strategy.comm_hook=bf16
        strategy.reduce_group=2 | in its own way => strategy.comm_hook=none
    launch.nproc=2 strategy=collective strategy.powersgd.rank=4
        strategy.powersgd.rank=4 | nothing is compressed => strategy.comm_hook=powersgd
    launch.nproc=2 strategy=collective strategy.comm_hook=powersgd strategy.powersgd.rank=0
        strategy.powersgd.rank=0 | 1 => strategy.powersgd.rank=
    launch.nproc=2 strategy=collective strategy.comm_hook=powersgd strategy.powersgd.start_step=1
        strategy.powersgd.start_step=1 | 2 => strategy.powersgd.start_step=
    launch.nproc=2 strategy=collective strategy.comm_hook=powersgd max_steps=10
        strategy.powersgd.start_step=10 | max_steps=10 | no gradient => strategy.powersgd.start_step=2
    launch.nproc=2 strategy=collective strategy.comm_hook=powersgd precision=fp16
        precision=fp16 | scale of its own => precision=bf16
    launch.nproc=2 strategy=collective strategy.static_graph=true strategy.gradient_merge.k_steps=2
        strategy.static_graph=true | gradient merge => strategy.static_graph=false
    launch.nproc=2 strategy=collective strategy.static_graph=true strategy.find_unused_parameters=true
        strategy.find_unused_parameters=true | finds unused parameters once => strategy.find_unused_parameters=false
    launch.nproc=2 strategy=collective strategy.bucket_cap_mb=0.5 compile=true
        strategy.bucket_cap_mb=0.5 | parts of at least 1 MiB => strategy.bucket_cap_mb=1 (or compile=false)
    profile=yes_please | profile=yes_please | true or false => profile=
    profile=true execution.profile_steps=0 | execution.profile_steps=0 | at least 1 => execution.profile_steps=5
    launch.ips=240.0.0.1,240.0.0.2
        launch.ips=240.0.0.1,240.0.0.2 | none of these addresses is this host's (its own is
        => this command on those hosts, or launch.ips with
    launch.nnodes=2 launch.master_addr=240.0.0.1
        launch.master_addr=240.0.0.1 | not this host's address => launch.master_addr=
    launch.nnodes=2 launch.master_port=99999999 | at most 65535 => launch.master_port=29500
    launch.nproc=2 launch.master_addr=240.0.0.1 launch.master_port=3000
        not this host's address => launch.master_addr=127.0.0.1
"""
OPTIMIZATION = """
    optimizer=nesterof | no such option | nesterov, rmsprop => optimizer=nesterov
    strategy=pserver_sync optimizer=lbfgs | optimizer=lbfgs | several times => optimizer=adam
    optimizer=zzzz | no such option | any of torch.optim, by optimizer.name=NAME => optimizer=NAME
    model=zzzz | no such option => model=NAME
    optimizer=nadam | no such option => optimizer=torch optimizer.name=NAdam
    model=conv3x3 | no such option => model=NAME
    model=resnet34 | no such option => model=torchvision model.name=resnet34
    optimizer=torch optimizer.name=LBFGS | optimizer.name=LBFGS | several times => optimizer=adam
    optimizer=torch optimizer.name=SparseAdam | sparse gradients alone => optimizer.sparse=adam
    optimizer=torch optimizer.name=Muon
        takes matrices alone (2 dimensions), and features.0.weight, features.0.bias | classifier.bias are none
        => optimizer=muon
    launch.nproc=2 strategy=local_sgd optimizer=schedule_free
        ScheduleFreeAdamW | does not exchange => strategy=collective (or optimizer=adamw)
    strategy=pserver_geo optimizer=schedule_free_sgd | does not exchange => strategy=collective
    optimizer=schedule_free ema.decay=0.9 | ema.decay=0.9 | averages the weights itself => ema.decay=null
    launch.nproc=2 strategy=sharded optimizer=muon | optimizer=muon | whole matrices => strategy=collective
    strategy=pserver_sync optimizer=muon | Muon needs them whole => optimizer=sgd
    optimizer=torch optimizer.name=Rprop optimizer.weight_decay=0.1 | optimizer.weight_decay | no such argument
    optimizer.decay_norms_and_biases=maybe | true or false
    optimizer.lr_factors=3 | a mapping => optimizer.lr_factors={}
    optimizer.lr_factors={classifier:fast} | classifier | fast
    optimizer.lr_factors={classifier:-1} | at least 0 (which freezes) => optimizer.lr_factors={classifier: 1}
    optimizer.lr_factors={clasifier:2}
        no parameter of the model | features, classifier => optimizer.lr_factors={classifier: 2.0}
    optimizer.lr_factors={features.1:2} | no parameter of the model has a name like features.1
    optimizer.lr_factors={*:0} | nothing is left to train => optimizer.lr_factors={*: 0, classifier: 1}
    optimizer.layer_decay=0 | optimizer.layer_decay=0 | greater than 0
    optimizer.layer_decay=1.5 | at most 1
    optimizer.lr_scaling=log | none, linear, sqrt
    optimizer.lr_base_batch=0 | at least 1 sample
    scheduler=onecycle | no such option => scheduler=one_cycle
    scheduler=multistep scheduler.milestones=[30,20] | scheduler (trainer.optim.schedules.MultiStep) | rise
    scheduler=one_cycle scheduler.anneal=cosine | cos, linear => scheduler.anneal=cos
    scheduler=one_cycle scheduler.rise=2 | at most 1
    scheduler=polynomial scheduler.power=0 | greater than 0 => scheduler.power=1
    scheduler=plateau scheduler.metric=val/los
        scheduler.metric=val/los | val/loss, val/acc1, val/acc5 => scheduler.metric=val/loss
    scheduler=plateau execution.val_every=0 | scheduler.metric=val/loss | at the end => execution.val_every=1
    ema.decay=1.5 | ema.decay=1.5 | less than 1 => ema.decay=0.999
    resume=true | resume=true | says where from => hydra.run.dir=FOLDER resume=auto
    resume=auto
        resume=auto | the folder has the time in its name => hydra.run.dir=outputs/digits_lenet/NAME resume=auto
    scheduler._target_=torch.optim.lr_scheduler.StepLR +scheduler.step_size=5 +scheduler.gamma=0.5
        scheduler._target_= | counts its steps => scheduler=step scheduler.every_epochs=5 scheduler.gamma=0.5
    scheduler._target_=torch.optim.lr_scheduler.CyclicLR
        scheduler._target_= | counts its steps => a class of your own with factor(step)
    resume_from=x | resume_from=x | resume=auto | resume=FOLDER
    scheduler.warmup_epochs=nan | finite => scheduler.warmup_epochs=1.0
    ema.dekay=0.9 | ema.dekay=0.9 | no such key => ema.decay=0.9
    ema=0.9 | ema=0.9 | holds the keys => ema.decay=VALUE
    ema={decay:fast} | decay | a number
    ~ema | the run needs this key => ema.decay=null
    strategy=pserver_async ema.decay=0.9 | ema.decay=0.9 | each worker sees other parameters => strategy=pserver_sync
    strategy=pserver_geo ema.decay=0.9 | no common row => strategy=pserver_sync
    best.metric=acc5 | best.metric=acc5 | val/acc5 => best.metric=val/acc5
    best.metric=val_ema/acc1 | ema.decay=null => ema.decay=0.999
    best.metric=acc1 | best.metric=acc1: | val/acc1 => best.metric=val/acc1
    best.metric=val_acc1 | val/acc1 => best.metric=val/acc1
    best.metric=test/acc1 | val/acc1 => best.metric=val/acc1
    best.metric=zzz | val/acc1 => best.metric=val/loss
    best.metric=map | val/acc1 => best.metric=val/loss
    best.metric=ema/acc1 | val/acc1 => best.metric=val_ema/acc1 ema.decay=0.999
    best.metric=val_ema/top1 ema.decay=0.9 | val_ema/acc1 => best.metric=val_ema/acc1
    best.metric=train/loss | a validation here measures => best.metric=val/loss
    early_stop.metric=val/auc | val/loss, val/acc1, val/acc5 => early_stop.metric=val/
    early_stop.metric=val/accuracy | val/loss, val/acc1, val/acc5 => early_stop.metric=val/acc1
    early_stop.metric=val/loss early_stop.patience=0 | at least 1 validation
    early_stop.metric=val/loss execution.val_every=0 | goes by validations => execution.val_every=1
    validation=false early_stop.metric=val/loss
        early_stop.metric=val/loss | nothing is validated => early_stop.metric=null (or validation=true)
    validation=false best.metric=val/acc5 | best.metric=val/acc5 | goes by validations => best.metric=null
    validation=false scheduler=plateau | scheduler.metric=val/loss | goes by validations => scheduler=cosine
    validation=false checkpoint.keep_best=1
        checkpoint.keep_best=1 | no checkpoint is the best => checkpoint.keep_best=0
    validation=false limit_val_batches=1 | limit_val_batches | nothing is validated => limit_val_batches=null
    validation=false execution.val_every_steps=1 | execution.val_every_steps => execution.val_every_steps=null
    validation=false +metrics.mine={_target_:torchmetrics.classification.MulticlassF1Score,num_classes:10}
        metrics.mine | nothing is validated => ~metrics.mine
    strategy.clip_value=0 | greater than 0
    strategy.clip_value=1 strategy.clip_norm=1 | strategy.clip_value=1 | order would matter => strategy.clip_norm=null
    strategy=local_sgd strategy.k_steps=1 launch.nproc=2 strategy.clip_value=1 | own gradient => strategy=collective
    +model.zero_init_residual=true | model.zero_init_residual=true | no residual block => model.zero_init_residual=false
"""
CLICKS = """
    data=criteo | data.path | has no value => data.path=VALUE
    data=criteo data.path=nowhere | data.path=nowhere | no such file, folder or pattern => data.path=FILE
    data=criteo data.path=[nowhere/*.gz] | data.path=nowhere/*.gz | no such file
    data=criteo data.path=3 | data.path=3 | a text or a list of texts
    model.table_size=100 | model.table_size=100 | data.hash_size => model.table_size=1000001
    model.table_size=0 data.hash_size=2 | model.table_size=0
    data.hash_size=0 | data.hash_size=0 | at least 2 ids => data.hash_size=1000001
    data.hash_size=many | data.hash_size=many | whole number of ids
    data.hash_size=2.5 | data.hash_size=2.5 | whole number
    data.max_bad_fraction=2 | at most 1 => data.max_bad_fraction=0.01
    data.cache=false strategy=single | data.cache=false | strategy=single => data.cache=true
    strategy=sharded launch.nproc=2 launch.servers=null | strategy=sharded | are sparse => strategy=pserver_sync
    strategy=local_sgd strategy.begin=gradients strategy.begin_step=9 launch.nproc=2 launch.servers=null
        strategy.begin=gradients | are sparse => strategy.begin=parameters
    strategy=collective strategy.comm_streams=2 launch.nproc=2 launch.servers=null
        strategy.comm_streams | are sparse => strategy.comm_streams=1
    optimizer=momentum | optimizer (torch.optim.SGD, momentum=0.9) | embedding tables => optimizer.sparse=adagrad
    optimizer=torch optimizer.name=RMSprop | optimizer (torch.optim.RMSprop) => optimizer.sparse=adagrad
    optimizer.sparse=adamw | optimizer.sparse=adamw | auto, sgd, adagrad, rowwise_adagrad, adam => optimizer.sparse=adam
    model.hidden=[0] | model.hidden=[0] | at least 1
    model.hidden=400 | model.hidden=400 | a list
    loss=cross_entropy | loss (torch.nn.CrossEntropyLoss) | mean over samples => loss=binary_cross_entropy
    model=lenet ~model.init_scale ~model.table_size | model (trainer.models.lenet.LeNet) | does not take samples
    model.sparse_slots=20 | WideAndDeep) | does not take samples of {'dense': (13,), 'sparse': (26,)}
    strategy=pserver_ssp strategy.evict_by=event_time
        strategy.evict_by=event_time | no input called time => strategy.evict_by=steps
    strategy=single model.table_size=null data.hash_size=null
        model.table_size=null | whole tables => strategy=pserver_async
    strategy=single launch.servers=1 | launch.servers=1 | no servers => launch.servers=null
    strategy=pserver_geo optimizer=momentum | embedding tables | optimizer.sparse=adagrad
    strategy=pserver_sync data.cache=false | data.cache=false | by number => data.cache=true
    data=synthetic_criteo strategy=collective launch.nproc=2 strategy.comm_hook=bf16
        strategy.comm_hook=bf16 | sparse => strategy.comm_hook=none
    early_stop.metric=accuracy | val/auc, val/acc => early_stop.metric=val/acc
    strategy=pserver_sync ema.decay=0.9 | ema.decay=0.9 | keeps the rows of embedding in servers => strategy=collective
    early_stop.metric=val/acc1 | val/loss, val/auc => early_stop.metric=val/acc
    data=criteo data.path={file} | is not in Criteo's format | conftest.py:1: 1 field instead of 40
"""
WHOLE_LINES = """
    +recipe=digits_lenett | +recipe=digits_lenett | no such recipe | resnet50_flowers => +recipe=digits_lenet
    recipe=digits_lenet | recipe=digits_lenet | with a plus => +recipe=digits_lenet
    digits_lenet | digits_lenet | +recipe => +recipe=digits_lenet
    model=lenet | no data => data=OPTION
    data=digits | no model => model=OPTION
    model=torchvision data=digits | model.name | has no value => model.name=VALUE
    --config-dir /nope | --config-dir /nope | no such folder => --config-dir FOLDER
    --config-name nope +recipe=digits_lenet | --config-name nope | no nope.yaml => --config-name config
    --config-path /tmp +recipe=digits_lenet | --config-path => --config-dir FOLDER
    --cfg foo +recipe=digits_lenet | --cfg | 'foo' | 'job' => --help
    --cfg job -p modell +recipe=digits_lenet | --package modell | no such part => --package model
    --cfg job +recipe=digits_lenet --info | --cfg --info | do not go together
    --resolve +recipe=digits_lenet | --resolve | goes with --cfg => --cfg job --resolve
    -sc query=bash | COMP_LINE => --shell-completion install=bash
    -sc install=ksh | --shell-completion => install=bash
    --info | no recipe => +recipe=digits_lenet
    --recipe digits_lenet | --recipe | there is no such flag => +recipe=
    --hydra-help foo=3 | foo | no such key
    --gpus=0,1 train.py | --gpus=0,1: there is no such flag => launch.nproc=2 (and CUDA_VISIBLE_DEVICES=0,1
    --selected_gpus 0,1,2,3 +recipe=digits_lenet
        --selected_gpus 0,1,2,3 => launch.nproc=4 (and CUDA_VISIBLE_DEVICES=0,1,2,3
    --gpus | --gpus => launch.nproc=N (and CUDA_VISIBLE_DEVICES=0,1
    --nproc_per_node=4 | --nproc_per_node=4 => launch.nproc=4
    --nproc-per-node 4 | --nproc-per-node 4 => launch.nproc=4
    --server_num=1 --worker_num=2 --gpus=0,1 train.py
        --server_num=1 --worker_num=2 --gpus=0,1
        => strategy=pserver_async launch.servers=1 launch.workers=2 launch.nproc=2 (and CUDA_VISIBLE_DEVICES=0,1
    --ips=10.0.0.1,10.0.0.2 --gpus 0,1 | --ips=10.0.0.1,10.0.0.2 => launch.ips=10.0.0.1,10.0.0.2 launch.nproc=2
    --cluster_node_ips=10.0.0.1,10.0.0.2 --node_ip=10.0.0.2 --started_port=6170 --selected_gpus=0,1
        --node_ip: each host finds its own address in launch.ips
        => launch.ips=10.0.0.1,10.0.0.2 launch.master_port=6170 launch.nproc=2
    --log_dir ./mylog | --log_dir ./mylog => hydra.run.dir=./mylog
    --servers=10.0.0.1:8000,10.0.0.2:8000 --workers=10.0.0.3:8000
        --servers=10.0.0.1:8000,10.0.0.2:8000
        => launch.server_endpoints=10.0.0.1:8000,10.0.0.2:8000 launch.role=ROLE launch.rank=N
    --servers 2 --workers 4 | --servers 2 --workers 4 => launch.servers=2 launch.workers=4
    --use_paddlecloud train.py | --use_paddlecloud: => launch.env=paddle
    --http_port=8080 | --http_port: the processes meet without it
    --elastic_server=10.0.0.1:2379 | --elastic_server: the number of processes does not change | launch.max_restarts
    --heter_worker_num=2 | --heter_worker_num: there are servers and workers, and no third role
    --heter_workers=10.0.0.1:80 | --heter_workers: there are servers and workers, and no third role
    --run_mode=ps | --run_mode=ps => strategy=pserver_async
    --run_mode=collective | --run_mode=collective => strategy=collective
    --devices=0,1 --master=10.0.0.1:6170 --rank 1
        --devices=0,1 => launch.nproc=2 launch.master_addr=10.0.0.1 launch.master_port=6170 launch.node_rank=1
    --cfg job --resolve +recipe=digits_lenet epochs=${foo} | epochs=${foo} | no key foo
    -m +recipe=digits_lenet hydra.job.name=a,b | hydra.job.name=a,b | swept
    -m +recipe=digits_lenet hydra.sweep.dir=/proc/x epochs=1,2 | hydra.sweep.dir=/proc/x | takes no files
    -m +recipe=digits_lenet data.batch_size=16,abc | data.batch_size=abc | whole number of samples
    -m +recipe=digits_lenet data.batch_size=16,100000
        job | data.batch_size=100000 | 1438 training samples => data.batch_size=1438
    -m +recipe=digits_lenet optimizer=sgd,sgdd | optimizer=sgdd | no such option => optimizer=sgd
    -m +recipe=digits_lenet,nope | +recipe=nope | no such recipe
    -m +recipe=digits_lenet epoch=1,2 | epoch | no such key => epochs
    -m +recipe=digits_lenet optimizer.lr=0.1,nan epochs=1,2 | error: optimizer.lr=nan in job 2 (epochs=1): must be
    model=torchvision model.name=vgg11 data=digits model.zero_init_residual=true
        in vgg11 there is no last norm => model.zero_init_residual=false
    model=finetune model.name=resnet18 model.weights={file} data=digits +model.zero_init_residual=true
        model.zero_init_residual=true | would undo => model.zero_init_residual=false
"""
SWEPT = """
    strategy=single,local_sgd launch.servers=1 | launch.servers=1: strategy=local_sgd has no servers
    strategy=single,collective strategy.k_steps=2 | strategy.k_steps=2: strategy=
    strategy=single,local_sgd strategy.k_stepz=2 | strategy.k_stepz=2: there is no such key
    strategy=single,local_sgd strategy.k_steps=0 | strategy.k_steps=0 in job 1 (strategy=local_sgd): must be at least 1
    strategy=single launch.nproc=1,2 | 2 workers in job 1 (launch.nproc=2): strategy=single is one process
    optimizer=sgd optimizer.momentum=0.1,0.9 | optimizer=sgd has no such key
    seed=1,2 name=${x} | name=${x}: there is no key x
    seed=1,2 hydra.sweep.dir=${x} | hydra.sweep.dir=${x}: there is no key x
    seed=1,2 tracking.experiment=${oc.env:NOPE_NOT_SET} | there is no environment variable NOPE_NOT_SET
    seed=0,1 optimizer.lr=0.1,0.2 hydra.sweep.subdir=lr_${optimizer.lr}
        job 2 (seed=1 optimizer.lr=0.1): would write over job 0
    seed=1,1 | job 1: is the same run as job 0
    seed=1,2 hydra.sweep.subdir=. | where the sweep has its own files
    seed=1,2 hydra.sweep.subdir=multirun.yaml | /multirun.yaml as a folder, which is a file
    seed=1,2 hydra.sweep.dir=. hydra.sweep.subdir=multirun.yaml/${seed} | /multirun.yaml as a folder, which is a file
    name=sweep.csv,b hydra.sweep.dir=. hydra.sweep.subdir=${name} | /sweep.csv as a folder, which is a file
    name=a,a/b hydra.sweep.subdir=${name} | a/b is below a
    seed=1,2 hydra.run.dir=x | Type instead: hydra.sweep.dir=x
    seed=1,2 tracking.run_name=x hydra.sweep.subdir=${tracking.run_name} | names the folder x for both
"""
FEATURES_OF_HYDRA = """
    hydra/launcher=joblib | sweep.parallel=N so many at a time => sweep.parallel=2
    hydra/sweeper=optuna => sweep=optuna
    logger=wandb => tracking=mlflow
    +logger=wandb => tracking=mlflow
    +hydra.job.env_set={A:b} => NAME=VALUE python -m trainer
    hydra.job.env_copy=[NOPE] => without hydra.job.env_copy
    +hydra.callbacks={x:{_target_:a.B}} => callbacks=[{_target_:
    hydra.job.chdir=true => hydra.job.chdir=false
    hydra.verbose=true => verbosity=debug
    hydra.mode=MULTIRUN => -m
    hydra.job.name=x => name=NAME
    hydra/job_logging=default => hydra/job_logging=none
    hydra.sweep.dir=x => hydra.run.dir=x
    hydra.searchpath=[file:///nowhere] => hydra.searchpath=[file://FOLDER]
    hydra.job.num=3 => without hydra.job.num
    +model._args_=[1] => +model.NAME=VALUE
    +optimizer._partial_=true => optimizer without _partial_
    callbacks=[{_target_:a.B,_partial_:true}] => callbacks[0] without _partial_
    strategy.bucket_cap_mb=10 => launch.nproc=2
"""
CASES = [
    *cases(f"{DIGITS} ", OPTIMIZATION, SERVED, KNOBS, NAMES, FLAGS, WRITING, VALUES, ARGUMENTS, TARGETS, TORCH, SIZES),
    *cases(f"{CTR} ", CLICKS),
    *cases("", WHOLE_LINES),
    Case("", ("no recipe", "--help"), DIGITS),
]


def assert_refused(case: Case, code: int, error: str, folder: Path) -> None:
    assert code == 2, error
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for part in case.says:
        assert part in error
    if case.instead:
        assert case.instead in error.partition("Type instead: ")[2], error
    assert list(folder.iterdir()) == []


MORE = [*cases(f"-m {DIGITS} ", SWEPT), *cases(f"{DIGITS} plan=true ", FEATURES_OF_HYDRA)]


@pytest.mark.all
@pytest.mark.parametrize(
    "case", [*CASES, *MORE], ids=lambda case: case.typed.removeprefix(f"{DIGITS} ")[:100] or "nothing"
)
def test_wrong_input_is_refused_in_one_sentence(case: Case, run: Run, folder: Path) -> None:
    code, out, error = run(*case.typed.split())
    assert_refused(case, code, error, folder)
    assert out == ""


IN_A_FOLDER = """
    files | data.root= | has no folders, of which each is a class
    empty | data.root= | holds no training images
    strange | data.root= | classes that | does not have: tulip => rename
    good data.val=tests | data.val=tests | no such folder => data.val=FOLDER
    good data.num_classes=5 | data.num_classes=5 | has 3 classes => data.num_classes=3
    good data.augment=randaugmen | data.augment=randaugmen => data.augment=randaugment
    good data.cache=disk | data.cache=disk => data.cache=
    good data.cache=device data.augment=randaugment model.in_channels=3 model.image_size=224
        data.cache=device | one by one on the CPU => data.cache=ram
    good data.cache=device data.num_workers=2 model.in_channels=3 model.image_size=224
        data.num_workers=2 | no process reads => data.num_workers=auto
    good data.decode=gpu device=cpu model.in_channels=3 model.image_size=224
        data.decode=gpu | no GPU trains (device=cpu) => data.decode=cpu
    good data.decode=nvjpeg | data.decode=nvjpeg | auto, cpu, gpu => data.decode=
    good data.on_bad=ignore | data.on_bad=ignore => data.on_bad=
    good data.erasing=2 | data.erasing=2 => data.erasing=
    good data.mixup=0.2 loss=squared_error loss.target=class_number
        data.mixup=0.2 | loss.target=class_number does not take => loss=cross_entropy
    good data.mixup=0.2 loss=binary_cross_entropy | data.mixup=0.2 | shares of classes => loss=cross_entropy
    good model=convnet data.image_size=32 data.val_size=48
        data.val_size=48: model (trainer.models.convnet.Convnet) | not of (3, 48, 48) in validation => data.val_size=32
    good data.transforms=[{_target_:{v2}.ColourJitter}]
        data.transforms[0]._target_ | no 'ColourJitter' => v2.ColorJitter
    good data.transforms=[{_target_:nobody.Jitter}] | data.transforms[0]._target_=nobody.Jitter | no module 'nobody'
    good data.transforms=[{_target_:{v2}.ColorJitter,brightnes:0.4}]
        data.transforms[0].brightnes | no such argument => brightness: 0.4
    good data.transforms=[{_target_:{v2}.ColorJitter,hue:3}]
        data.transforms[0].hue=3 | hue values should be between
    good data.transforms=[ColorJitter]
        data.transforms[0]=ColorJitter | must be a mapping with a _target_ => {v2}.ColorJitter
    good data.transforms=[{_target_:pathlib.Path}] | data.transforms[0] (pathlib.Path) | cannot be called with an image
    good data.transforms=[{_target_:{v2}.RandomGrayscale},{_target_:{v2}.RandomCrop,size:16}]
        data.transforms[1] | gives (3, 16, 16) of uint8 instead of (3, 224, 224)
    good data.transforms=[{_target_:{v2}.ConvertImageDtype}]
        data.transforms[0] | of float32 instead of => the device normalises
    good data.transforms=[{_target_:{v2}.ToPILImage}]
        data.transforms[0] | gives a Image instead of a tensor
    good data.transforms=[{_target_:{v2}.LinearTransformation,transformation_matrix:[[1]],mean_vector:[1]}]
        data.transforms[0]
"""
MODELS_BY_NAME = """
    vit_b_32 data.val_size=256
        data.val_size=256: model ( | in validation | Expected 224 but got 256 => data.val_size=224
    vit_b_32 data.val_size=256 plan=true device=cuda | data.val_size=256: model ( | in validation => data.val_size=224
    googlenet +model.aux_logits=true | gives a GoogLeNetOutputs | one tensor of scores => model.aux_logits=false
    x ~model.name model._target_=torchvision.models.inception_v3 data.image_size=299
        gives a InceptionOutputs => +model.aux_logits=false
    x ~model.name model._target_=torchvision.models.segmentation.fcn_resnet50 +model.weights_backbone=null
        fcn_resnet50 | gives a OrderedDict | one tensor of scores
    fcn_resnet50 | model.name=fcn_resnet50 | for segmentation => model.name=resnet50
"""
OF_DIGITS = """
    loss.weight=[1,2] | loss.weight= | 2 weights for 10 classes => loss.weight=balanced
    loss.weight=[1,1,1,1,1,1,1,1,1,-2] | loss.weight= | holds -2 => loss.weight=[1,1,1,1,1,1,1,1,1,1]
    loss.weight=[1,1,1,1,1,1,1,1,1,nan] | loss.weight= | holds nan => loss.weight=[1,1,1,1,1,1,1,1,1,1]
    loss.weight=[0,0,0,0,0,0,0,0,0,0] | loss.weight= | all weights are 0 => loss.weight=[1,1,1,1,1,1,1,1,1,1]
    loss.weight=[a,b] plan=true | loss.weight=[a,b] | in the order of the classes => loss.weight=balanced
    loss.weight=2 | loss.weight=2 | a list with a number for each class => loss.weight=balanced
    loss.weight=[0,1,1,1,1,1,1,1,1,1] loss.label_smoothing=0.1
        loss.label_smoothing=0.1 | weight 0 => loss.label_smoothing=0.0
    +loss.reduction=sum | loss.reduction=sum | is the sum over a batch => loss.reduction=mean
    sampler=class_balanced sampler.shuffle=false
        sampler.shuffle=false | orders the samples by itself => sampler.shuffle=true
    sampler.padding=contiguous sampler=class_balanced
        sampler.padding=contiguous | sampler=class_balanced does not => sampler.padding=strided
    sampler.padding=contiguous data.global_batch_size=64
        sampler.padding=contiguous | goes with data.batch_size => data.batch_size in place of
    sampler.padding=contiguous strategy=pserver_async
        sampler.padding=contiguous | lease blocks of work => data.work=static
    sampler.padding=blocks | sampler.padding=blocks => sampler.padding=
    data.read=scatter strategy=pserver_sync | data.read=scatter | has no group of workers => data.read=each
"""
OF_OTHER_DATA = """
    +recipe=resnet50_imagefolder model=lenet ~model.zero_init_residual data.root=nowhere
        data.root=nowhere | there is no such folder => data.root=FOLDER
    +recipe=cifar10_convnet data.transforms=[] | data.transforms | no such key
    +recipe=mnist_lenet data.root={made}/mnist
        t10k-images-idx3-ubyte is damaged: of 10 entries it has 9. => fetch it anew
    +recipe=cifar10_convnet data.root={made}/cifar
        1 of 120 labels are wrong | the first is 11, of image 19 in | test_batch => fetch it anew
    +recipe=resnet50_imagefolder | data.root | has no value => data.root=VALUE
    +recipe=mnist_json data.path=no.json.gz | data.path=no.json.gz | no such file => mnist.json.gz
    +recipe=mnist_json data.path={made}/text.json | data.path= | it breaks off
    +recipe=mnist_lenet data.download=false data.on_missing=error data.root=none
        data.root=none | MNIST is not in => data.on_missing=embedded
    +recipe=cifar10_convnet data.download=false data.on_missing=error data.root=none
        data.root=none | CIFAR-10 is not in => data.on_missing=embedded
    +recipe=resnet50_imagefolder data=shards data.path=none.tar | data.path=none.tar | no such files => data.path=
    +recipe=resnet50_random sampler=class_balanced | sampler=class_balanced | no samples to choose => sampler=each_once
    +recipe=resnet50_flowers data.root={made}/lacking data.download=false
        flowers-102 is there but lacks => data=embedded_flowers
    +recipe=wide_and_deep data=criteo data.path={made}/day_0.gz
        day_0.gz | is no gzip file => data.path=
    +recipe=resnet50_finetune data.root={made}/good model.weights=none.pt | model.weights=none.pt | no such file
    +recipe=resnet50_finetune data.root={made}/good model.weights=V9
        model.weights=V9 | IMAGENET1K_V1 => model.weights=DEFAULT
    +recipe=resnet50_finetune data.root={made}/good model.name=resnet51 | model.name=resnet51
"""
IMAGES = [
    *cases(FOLDER, IN_A_FOLDER),
    *cases(NAMED, MODELS_BY_NAME),
    *cases(f"{DIGITS} ", OF_DIGITS),
    *cases("", OF_OTHER_DATA),
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
    (root / "day_0.gz").write_text("plain text")
    (root / "lacking" / "flowers-102" / "jpg").mkdir(parents=True)
    images = mnist(root / "mnist") / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-400])
    batch = cifar(root / "cifar") / "cifar-10-batches-py" / "test_batch"
    content = pickle.loads(batch.read_bytes())
    content["labels"][-1] = 11
    batch.write_bytes(pickle.dumps(content, protocol=2))
    return root


@pytest.mark.all
@pytest.mark.parametrize("case", IMAGES, ids=lambda case: case.typed)
def test_images_that_cannot_be_trained_on_are_refused(
    case: Case, run: Run, folder: Path, made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    code, _, error = run(*case.typed.replace("{made}", str(made)).split())
    assert_refused(case, code, error, folder)
    assert not (tmp_path / "cache").exists()


DATA_FITS = """
    model.num_classes=5 | model.num_classes=5 | 10 classes => model.num_classes=10
    model.in_channels=3 | model (trainer.models.lenet.LeNet) | (1, 8, 8) | 3 channels
    loss._target_=torch.nn.MSELoss ~loss.label_smoothing | loss (torch.nn.MSELoss) | labels (N,) => loss=cross_entropy
    model._target_=torch.nn.Conv2d ~model.num_classes ~model.image_size +model.out_channels=10 +model.kernel_size=1
        model (torch.nn.Conv2d): makes outputs of ('N', 10, 8, 8) | scores (N, 10)
"""


@pytest.mark.parametrize("case", cases(f"{DIGITS} ", DATA_FITS), ids=lambda case: case.typed)
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


@pytest.mark.parametrize(
    "typed",
    ["best.metric=acc1", "best.metric=zzz", "best.metric=ema/acc1", "best.metric=Val_F1", "early_stop.metric=top5"],
)
def test_what_is_advised_for_a_metric_can_be_typed(typed: str, run: Run, folder: Path) -> None:
    code, _, error = run(DIGITS, typed)
    assert_refused(Case("", ("a validation here measures val/loss, val/acc1",)), code, error, folder)
    advised = error.partition("Type instead: ")[2].split()
    assert advised[0].startswith(typed.partition("=")[0]) and advised[0] != typed
    code, _, error = run(DIGITS, "plan=true", *advised)
    assert (code, error) == (0, "")


OF_YOUR_OWN = {
    "+recipe=my_lenet": "recipe/my_lenet.yaml",
    "+recipe=digits_lenet model=my_lenet": "model/my_lenet.yaml",
    "+recipe=digits_lenet data=cifar100": "data/cifar100.yaml",
    "+recipe=digits_lenet task=quantiles task.levels=[0.1]": "task/quantiles.yaml",
    "+recipe=digits_lenet tracking=[mlflow,csv]": "tracking/csv.yaml",
    "+recipe=mine/lenet": "recipe/mine/lenet.yaml",
}


@pytest.mark.parametrize("typed", OF_YOUR_OWN)
def test_an_option_of_ones_own_is_not_taken_for_another(typed: str, run: Run, folder: Path, tmp_path: Path) -> None:
    file = OF_YOUR_OWN[typed]
    group, name = file.removesuffix(".yaml").split("/", 1)
    code, _, error = run(*typed.split())
    assert_refused(Case("", ("there is no such",), f"{group}=NAME (or --config-dir FOLDER"), code, error, folder)
    assert f"if {name} is your own, in FOLDER/{file}" in error
    code, _, error = run("--config-dir", str(tmp_path), *typed.split())
    assert_refused(Case("", ("there is no such",), f"{group}=NAME"), code, error, folder)
    assert "--config-dir" not in error and error.endswith("=NAME\n")


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


def test_wrong_input_in_a_real_process(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "trainer", DIGITS, "data.batch_size=0"]
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
