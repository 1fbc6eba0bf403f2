"""How ourshard gets under Accelerate, Transformers and PEFT."""
