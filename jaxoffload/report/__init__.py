"""What people look at: explanations, pictures, traces. Reads plans and runs; no stage reads it."""
