"""Every private name of Lightning that the integration uses, and the methods that it replaces.

Lightning exists twice: ``lightning`` contains ``lightning.fabric`` and ``lightning.pytorch``; ``lightning_fabric`` and
``pytorch_lightning`` are the same code under other names. Whatever of them is loaded is adapted.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from elastic_agent.integrations import patching, signature
from elastic_agent.integrations.lightning.features import Feature
from elastic_agent.integrations.patching import Patch
from elastic_agent.integrations.signature import Signature
from elastic_agent.worker_variables import LIGHTNING_DISABLE

TESTED = "2.6.6"
"""The version of Lightning that the tests run with."""

FABRICS = ("lightning.fabric", "lightning_fabric")
PYTORCHES = ("lightning.pytorch", "pytorch_lightning")


_SETTINGS = (
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "overfit_batches",
    "precision",
)
"""The attributes of a ``Trainer`` on which the weights depend, and which do not depend on the nodes."""


# -- the world -----------------------------------------------------------------------------------


def _world_is_the_launchers(original: Any) -> Any:
    def validate_settings(self: Any, num_devices: int, num_nodes: int) -> None:
        """Accept any: nodes may have different numbers of workers, and the world changes."""

    return validate_settings


def _sampler_of_the_world(original: Any) -> Any:
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    return property(distributed_sampler_kwargs)


def _devices_before_data(original: Any) -> Any:
    @functools.wraps(original)
    def on_trainer_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The first thing that a Trainer does after it has loaded the callbacks.
        fit_to_world(self.trainer._accelerator_connector)
        return original(self, *args, **kwargs)

    return on_trainer_init


def _devices_before_run(original: Any) -> Any:
    @functools.wraps(original)
    def _prepare_run_method(self: Any) -> Any:
        # The first thing that a Fabric does after it has loaded the callbacks.
        fit_to_world(self._connector)
        self._strategy = self._connector.strategy
        self._accelerator = self._connector.accelerator
        return original(self)

    return _prepare_run_method


def fit_to_world(connector: Any) -> None:
    """Replace the number of devices and nodes that the script gave by those of the launcher.

    A connector has made its strategy by now. It is connected again, and replaced if it is one for a single process.
    """
    connector._num_nodes_flag = int(os.environ["GROUP_WORLD_SIZE"])
    connector._parallel_devices = _devices_of_this_node(connector)
    _use_launchers_environment(connector)
    if hasattr(connector.strategy, "parallel_devices"):
        connector.strategy.parallel_devices = connector._parallel_devices
    elif int(os.environ["WORLD_SIZE"]) > 1:
        connector._strategy_flag = "ddp"
        connector._init_strategy()
    else:
        return
    connector._lazy_init_strategy()


def _devices_of_this_node(connector: Any) -> list[Any]:
    devices: list[Any] = connector._parallel_devices
    workers = int(os.environ["LOCAL_WORLD_SIZE"])
    if len(devices) >= workers:
        return devices[:workers]
    accelerator = type(connector.accelerator)
    if (
        devices and getattr(devices[0], "type", "") != "cpu"
    ):  # --virtual-local-rank shows each worker one device
        workers = max(int(os.environ["LOCAL_RANK"]) + 1, min(workers, accelerator.auto_device_count()))
    found: list[Any] = accelerator.get_parallel_devices(accelerator.parse_devices(workers))
    return found


def _use_launchers_environment(connector: Any) -> None:
    """Replace Lightning's other environments, such as a ``SLURMEnvironment`` that the script made."""
    environment = type(connector.cluster_environment)
    package = environment.__module__.rpartition(".")[0]
    if not package.endswith("fabric.plugins.environments"):
        return  # the script's own
    elastic = importlib.import_module(f"{package}.torchelastic").TorchElasticEnvironment
    if environment is not elastic:
        connector.cluster_environment = elastic()
        if hasattr(connector.strategy, "cluster_environment"):
            connector.strategy.cluster_environment = connector.cluster_environment


# -- signals -------------------------------------------------------------------------------------


def _no_signal_handlers(original: Any) -> Any:
    def register_signal_handlers(self: Any) -> None:
        """Leave signals to the agent: Lightning's handler broadcasts, and hangs if a peer has died."""
        self.received_sigterm = False
        self._original_handlers = {}

    return register_signal_handlers


def _no_broadcast(original: Any) -> Any:
    def _broadcast_sigterm_tensor(self: Any) -> None:
        """Broadcast nothing: there is no handler that could have set the flag."""

    return _broadcast_sigterm_tensor


def _not_under_slurm(original: Any) -> Any:
    def detect() -> bool:
        return False

    return staticmethod(detect)


# -- notices -------------------------------------------------------------------------------------


def _notice_after_step(original: Any) -> Any:
    @functools.wraps(original)
    def on_advance_end(self: Any, data_fetcher: Any) -> None:
        hooks = hooks_of(self.trainer)
        if hooks is not None and hooks.take_validated() and self._skip_next_val:
            self._skip_next_val = False  # this step's end was reached before the checkpoint was saved
            return
        original(self, data_fetcher)
        if hooks is not None and not self._num_ready_batches_reached():
            hooks.after_step(self.trainer, complete=not self._should_accumulate())

    return on_advance_end


def _notice_after_epoch(original: Any) -> Any:
    @functools.wraps(original)
    def on_advance_end(self: Any) -> None:
        original(self)
        hooks = hooks_of(self.trainer)
        if hooks is not None:
            hooks.after_epoch(self.trainer)

    return on_advance_end


# -- checkpoints ---------------------------------------------------------------------------------


def _note_request_for_last(original: Any) -> Any:
    @functools.wraps(original)
    def _select_ckpt_path(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        self._elastic_agent_wants_last = ckpt_path == "last"
        return original(self, state_fn, ckpt_path, *args, **kwargs)

    return _select_ckpt_path


def _continue_training(original: Any) -> Any:
    @functools.wraps(original)
    def resume_start(self: Any, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        hooks = hooks_of(self.trainer)
        if hooks is not None and self.trainer.state.fn == "fit" and not is_trial(self.trainer):
            # "last" is a choice of Lightning's, which does not know of the checkpoints that were saved on a notice.
            wants_last = getattr(self, "_elastic_agent_wants_last", False)
            for newest in hooks.begin_training(self.trainer, None if wants_last else checkpoint_path):
                # The run's own workers saved it, whatever objects the script puts into its checkpoints.
                original(self, newest, False)
                if hooks.is_of_this_training(self.trainer, newest, self._loaded_checkpoint):
                    return
            self._loaded_checkpoint = {}
        original(self, checkpoint_path, weights_only)

    return resume_start


def _record_checkpoint(original: Any) -> Any:
    @functools.wraps(original)
    def save_checkpoint(
        self: Any, filepath: Any, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        hooks = hooks_of(self) if self.state.fn == "fit" else None
        if hooks is not None:
            hooks.about_to_save(self, filepath)
        original(self, filepath, weights_only, storage_options)
        if hooks is not None and not weights_only:
            hooks.saved(self, filepath)

    return save_checkpoint


def after_saves(trainer: Any, call: Callable[..., None], *arguments: Any) -> None:
    """Call it when all saves that were begun are complete: now, except with an ``AsyncCheckpointIO``."""
    saving = trainer.strategy.checkpoint_io
    executor = getattr(saving, "_executor", None)
    if executor is None:
        call(*arguments)
    else:  # it has one thread, which does one thing after the other
        executor.submit(lambda: call(*arguments) if getattr(saving, "_error", None) is None else None)


# -- samples -------------------------------------------------------------------------------------


def _loaders_requested(original: Any) -> Any:
    @functools.wraps(original)
    def setup_data(self: Any) -> None:
        hooks = hooks_of(self.trainer)
        if hooks is not None and (self._combined_loader is None or self._should_reload_train_dl):
            hooks.samples.release()
        original(self)

    return setup_data


def _each_sample_once(original: Any) -> Any:
    @functools.wraps(original)
    def _prepare_dataloader(self: Any, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        trainer = self.trainer
        hooks = hooks_of(trainer)
        if hooks is not None and mode == "train" and trainer._accelerator_connector.use_distributed_sampler:
            distributed = trainer._accelerator_connector.is_distributed
            sampler = hooks.samples.sampler_for(
                dataloader,
                shuffle=shuffle and not trainer.overfit_batches,
                epoch=trainer.fit_loop.epoch_progress.current.processed,
                world=trainer.distributed_sampler_kwargs if distributed else None,
            )
            if sampler is not None:
                update = sys.modules[type(self).__module__]._update_dataloader
                return update(dataloader, sampler, mode=mode)
        return original(self, dataloader, shuffle, mode)

    return _prepare_dataloader


def set_batches_done(trainer: Any, count: int) -> None:
    """Have the counters of batches within the epoch say that so many are done."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    moved = count - current.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + moved)


# -- all of it -----------------------------------------------------------------------------------

PATCHES = (
    Patch(
        Feature.WORLD,
        "plugins.environments.torchelastic",
        "TorchElasticEnvironment.validate_settings",
        _world_is_the_launchers,
        ("ValueError",),
        FABRICS,
    ),
    Patch(
        Feature.WORLD,
        "strategies.launchers.subprocess_script",
        "_SubprocessScriptLauncher.launch",
        None,
        ("validate_settings",),
        FABRICS,
    ),
    *(
        Patch(Feature.WORLD, module, f"{owner}.distributed_sampler_kwargs", _sampler_of_the_world)
        for module, owner in (("strategies.ddp", "DDPStrategy"), ("strategies.fsdp", "FSDPStrategy"))
    ),
    Patch(
        Feature.WORLD,
        "trainer.connectors.data_connector",
        "_DataConnector.on_trainer_init",
        _devices_before_data,
        roots=PYTORCHES,
    ),
    Patch(
        Feature.WORLD,
        "trainer.trainer",
        "Trainer.__init__",
        None,
        ("_callback_connector.on_trainer_init(", "_data_connector.on_trainer_init("),
        PYTORCHES,
    ),
    Patch(Feature.WORLD, "fabric", "Fabric._prepare_run_method", _devices_before_run, roots=FABRICS),
    Patch(
        Feature.WORLD,
        "fabric",
        "Fabric.__init__",
        None,
        ("self._connector = ", "_configure_callbacks(", "_prepare_run_method()"),
        FABRICS,
    ),
    *(
        Patch(
            Feature.WORLD,
            module,
            f"{owner}._lazy_init_strategy",
            None,
            ("_parallel_devices", "_num_nodes_flag", "_configure_launcher"),
            roots,
        )
        for roots, module, owner in (
            (FABRICS, "connector", "_Connector"),
            (PYTORCHES, "trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
        )
    ),
    Patch(
        Feature.SIGNALS,
        "trainer.connectors.signal_connector",
        "_SignalConnector.register_signal_handlers",
        _no_signal_handlers,
        roots=PYTORCHES,
    ),
    Patch(
        Feature.SIGNALS,
        "trainer.connectors.signal_connector",
        "_SignalConnector.teardown",
        None,
        ("self._original_handlers",),
        PYTORCHES,
    ),
    Patch(
        Feature.SIGNALS,
        "loops.training_epoch_loop",
        "_TrainingEpochLoop._broadcast_sigterm_tensor",
        _no_broadcast,
        roots=PYTORCHES,
    ),
    Patch(
        Feature.SIGNALS,
        "plugins.environments.slurm",
        "SLURMEnvironment.detect",
        _not_under_slurm,
        roots=FABRICS,
    ),
    Patch(
        Feature.NOTICES,
        "loops.training_epoch_loop",
        "_TrainingEpochLoop.on_advance_end",
        _notice_after_step,
        ("self._skip_next_val",),
        PYTORCHES,
    ),
    Patch(
        Feature.NOTICES,
        "loops.training_epoch_loop",
        "_TrainingEpochLoop.advance",
        None,
        ("self._skip_next_val = True", "self.restarted_on_last"),
        PYTORCHES,
    ),
    *(
        Patch(
            Feature.NOTICES,
            "loops.training_epoch_loop",
            f"_TrainingEpochLoop.{name}",
            None,
            (text,),
            PYTORCHES,
        )
        for name, text in (
            ("_should_accumulate", "self"),
            ("_should_check_val_fx", "data_fetcher"),
            ("_num_ready_batches_reached", "self"),
        )
    ),
    Patch(Feature.NOTICES, "loops.fit_loop", "_FitLoop.on_advance_end", _notice_after_epoch, roots=PYTORCHES),
    Patch(
        Feature.RESUME,
        "trainer.connectors.checkpoint_connector",
        "_CheckpointConnector._select_ckpt_path",
        _note_request_for_last,
        roots=PYTORCHES,
    ),
    Patch(
        Feature.RESUME,
        "trainer.connectors.checkpoint_connector",
        "_CheckpointConnector.resume_start",
        _continue_training,
        roots=PYTORCHES,
    ),
    Patch(
        Feature.RESUME,
        "trainer.connectors.checkpoint_connector",
        "_CheckpointConnector._restore_modules_and_callbacks",
        None,
        ("self.resume_start(checkpoint_path, weights_only=weights_only)", "self.restore_callbacks()"),
        PYTORCHES,
    ),
    Patch(
        Feature.RESUME,
        "trainer.trainer",
        "Trainer.save_checkpoint",
        _record_checkpoint,
        ("filepath", "weights_only", "strategy.barrier"),
        PYTORCHES,
    ),
    Patch(
        Feature.RESUME,
        "plugins.io.async_plugin",
        "AsyncCheckpointIO",
        None,
        ("self._executor = ThreadPoolExecutor(max_workers=1)", "self._error = ex"),
        PYTORCHES,
    ),
    Patch(
        Feature.SAMPLER,
        "loops.fit_loop",
        "_FitLoop.setup_data",
        _loaders_requested,
        ("self._combined_loader is not None and not self._should_reload_train_dl",),
        PYTORCHES,
    ),
    Patch(
        Feature.SAMPLER,
        "trainer.connectors.data_connector",
        "_DataConnector._prepare_dataloader",
        _each_sample_once,
        (
            "dataloader: object, shuffle: bool, mode: RunningStage",
            "_update_dataloader(dataloader, sampler, mode=mode)",
        ),
        PYTORCHES,
    ),
    Patch(
        Feature.SAMPLER,
        "loops.fit_loop",
        "_FitLoop.update_restart_stage",
        None,
        ("RESTARTED_MID_EPOCH",),
        PYTORCHES,
    ),
    Patch(
        Feature.SAMPLER,
        "loops.training_epoch_loop",
        "_TrainingEpochLoop.on_run_start",
        None,
        ("data_fetcher.fetched += self.batch_progress.current.ready",),
        PYTORCHES,
    ),
)

_adapted: set[str] = set()
_unfit: set[Any] = set()


def adapt() -> frozenset[Feature]:
    """Replace what the features need in whatever of Lightning is loaded, and return the features in force."""
    roots = [root for root in loaded(FABRICS + PYTORCHES) if root not in _adapted]
    features = patching.wanted(LIGHTNING_DISABLE, Feature, quietly=not roots)
    for root in roots:
        _adapted.add(root)
        versions = str(sys.modules[root].__version__), TESTED
        _unfit.update(patching.apply(root, versions, PATCHES, features))
    return frozenset(feature for feature in Feature if feature in features - _unfit)


def loaded(roots: tuple[str, ...]) -> Iterator[str]:
    """Those of these packages that are imported completely."""
    for root in roots:
        package = sys.modules.get(root)
        if package is not None and hasattr(package, "__version__"):
            yield root


def hooks_of(trainer: Any) -> Any:
    """The integration's callback of this trainer; None without one, as while Lightning's tuner tries something."""
    return next((one for one in trainer.callbacks if getattr(one, "is_elastic_agent", False)), None)


def signature_of(trainer: Any) -> Signature:
    """Describe the training that ``fit`` begins, as far as it is known before weights are restored."""
    settings = {name: getattr(trainer, name, None) for name in _SETTINGS}
    module, data = trainer.lightning_module, trainer.datamodule
    source = trainer.fit_loop._data_source.instance
    given = not any(source is known for known in (None, module, data))
    loaders = signature.of_data("data", source) if given else {}
    is_sharded = trainer.strategy.restore_checkpoint_after_setup
    return {
        **signature.of_seed(),
        **signature.of_values("trainer", settings),
        **(signature.of_sharded_model(module) if is_sharded else signature.of_model(module)),
        **(signature.of_optimizers(trainer.optimizers) if is_sharded else {}),
        **signature.of_values("hyperparameters", module.hparams),
        **(signature.of_data("datamodule", data) if data is not None else {}),
        **signature.of_values("datamodule.hyperparameters", getattr(data, "hparams", {})),
        **loaders,
    }


def signature_of_data(trainer: Any) -> Signature:
    """Describe the training data as they are when training starts: the module or its data module may have made them."""
    if trainer.reload_dataloaders_every_n_epochs:  # they differ from epoch to epoch
        return {}
    loaders = enumerate(trainer.fit_loop._combined_loader.flattened)
    lengths = [signature.of_length(str(index), getattr(loader, "dataset", None)) for index, loader in loaders]
    return signature.of_values("data", {name: length for found in lengths for name, length in found.items()})


def is_trial(trainer: Any) -> bool:
    """Whether this call of ``fit`` is the tuner's, which ends before training begins."""
    return any(getattr(one, "_early_exit", False) for one in trainer.callbacks)


def restarted_mid_epoch(trainer: Any) -> bool:
    """Whether training begins within an epoch, whose start hooks are not called again."""
    return bool(trainer.fit_loop.restarted_mid_epoch)


def begin_next_epoch(trainer: Any) -> None:
    """Forget that a complete epoch was restored, which Lightning takes for one that is to be continued."""
    fit_loop: Any = trainer.fit_loop
    base: Any = type(fit_loop).__mro__[1]  # the setter of _FitLoop itself ignores False if max_steps is given
    base.restarting.fset(fit_loop, False)
    fit_loop._resuming_from_checkpoint = (
        False  # otherwise the epoch would use the iterator made before the restoration
    )


def validated_last(trainer: Any) -> bool:
    """Whether the last step that was taken was followed by a validation."""
    loop = trainer.fit_loop.epoch_loop
    return bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def current_batches(loops: dict[str, Any]) -> dict[str, Any]:
    """The counters of batches within the epoch, in a checkpoint's ``loops``."""
    counters: dict[str, Any] = loops["fit_loop"]["epoch_loop.batch_progress"]["current"]
    return counters
