"""The stages, a module each: ``run(rig)``, named as in :data:`headrace.gpu_check.plan.STAGES`."""
