"""How exact everyone's results are, beside float64: `tilewise bench --accuracy`."""
