"""Model families by ModelSpec.family; one file each."""

MODELS = {
    "llama": "tokenmill.models.llama:Llama",
    "deepseek_v3": "tokenmill.models.deepseek_v3:DeepseekV3",
}
