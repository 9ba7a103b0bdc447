"""What the integration depends on in Lightning's source, and how a new version of Lightning differs. A test asks."""

from __future__ import annotations

from elastic_agent.integrations.inspection import source_of
from elastic_agent.integrations.lightning.private_names import ADAPTATIONS, FABRICS, PYTORCHES, find

_NEEDED_IN_SOURCE = (
    (
        FABRICS,
        "plugins.environments.torchelastic",
        "TorchElasticEnvironment.validate_settings",
        ("ValueError",),
    ),
    (
        FABRICS,
        "strategies.launchers.subprocess_script",
        "_SubprocessScriptLauncher.launch",
        ("validate_settings",),
    ),
    (
        FABRICS,
        "fabric",
        "Fabric.__init__",
        ("self._connector = ", "_configure_callbacks(", "_prepare_run_method()"),
    ),
    (
        PYTORCHES,
        "trainer.trainer",
        "Trainer.__init__",
        ("_callback_connector.on_trainer_init(", "_data_connector.on_trainer_init("),
    ),
    (
        PYTORCHES,
        "trainer.trainer",
        "Trainer.save_checkpoint",
        ("filepath", "weights_only", "strategy.barrier"),
    ),
    (
        PYTORCHES,
        "trainer.connectors.checkpoint_connector",
        "_CheckpointConnector._restore_modules_and_callbacks",
        ("self.resume_start(checkpoint_path, weights_only=weights_only)", "self.restore_callbacks()"),
    ),
    (
        PYTORCHES,
        "loops.training_epoch_loop",
        "_TrainingEpochLoop.advance",
        ("self._broadcast_sigterm_tensor()", "self._skip_next_val = True", "self.restarted_on_last"),
    ),
    (PYTORCHES, "loops.training_epoch_loop", "_TrainingEpochLoop.on_advance_end", ("self._skip_next_val",)),
    (
        PYTORCHES,
        "plugins.io.async_plugin",
        "AsyncCheckpointIO",
        ("self._executor = ThreadPoolExecutor(max_workers=1)", "self._error = ex"),
    ),
    (PYTORCHES, "loops.training_epoch_loop", "_TrainingEpochLoop._should_accumulate", ("self",)),
    (PYTORCHES, "loops.training_epoch_loop", "_TrainingEpochLoop._should_check_val_fx", ("data_fetcher",)),
    (PYTORCHES, "loops.training_epoch_loop", "_TrainingEpochLoop._num_ready_batches_reached", ("self",)),
    (PYTORCHES, "loops.fit_loop", "_FitLoop.update_restart_stage", ("RESTARTED_MID_EPOCH",)),
    (
        PYTORCHES,
        "loops.fit_loop",
        "_FitLoop.setup_data",
        ("self._combined_loader is not None and not self._should_reload_train_dl",),
    ),
    (
        PYTORCHES,
        "loops.training_epoch_loop",
        "_TrainingEpochLoop.on_run_start",
        ("data_fetcher.fetched += self.batch_progress.current.ready",),
    ),
    (
        PYTORCHES,
        "trainer.connectors.data_connector",
        "_DataConnector._prepare_dataloader",
        (
            "dataloader: object, shuffle: bool, mode: RunningStage",
            "_update_dataloader(dataloader, sampler, mode=mode)",
        ),
    ),
    (
        PYTORCHES,
        "trainer.connectors.signal_connector",
        "_SignalConnector.teardown",
        ("self._original_handlers",),
    ),
    *(
        (
            roots,
            module,
            f"{owner}._lazy_init_strategy",
            ("_parallel_devices", "_num_nodes_flag", "_configure_launcher"),
        )
        for roots, module, owner in (
            (FABRICS, "connector", "_Connector"),
            (PYTORCHES, "trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
        )
    ),
)


def missing(root: str) -> list[str]:
    """How the Lightning that is imported as ``root`` differs from what is needed; each entry is a sentence."""
    problems = []
    for one in ADAPTATIONS:
        if root in one.roots:
            try:
                find(root, one)
            except LookupError:
                problems.append(f"{root}.{one} no longer exists: {one.feature} replaces it")
    for roots, module, path, needed in _NEEDED_IN_SOURCE:
        if root in roots:
            source = source_of(f"{root}.{module}", path)
            problems += [
                f"{root}.{module}.{path} no longer contains {text!r}" for text in needed if text not in source
            ]
    return problems
