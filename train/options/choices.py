"""Values of options that say more than a number: what a run learns by, how an adapter starts, who is told."""

REPORTERS = ("tensorboard", "wandb", "trackio", "mlflow")
SFT, DPO, ORPO, KTO = OBJECTIVES = ("sft", "dpo", "orpo", "kto")
LORA, *_ = STARTS = ("lora", "pissa", "pissa_niter_4", "pissa_niter_16")
