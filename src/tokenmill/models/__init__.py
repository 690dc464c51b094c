"""Model families by ModelSpec.family; one file each."""

MODELS = {"llama": "tokenmill.models.llama:Llama"}
