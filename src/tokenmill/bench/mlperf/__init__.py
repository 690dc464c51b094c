"""MLPerf: LoadGen, presets, accuracy, compliance and submissions."""
