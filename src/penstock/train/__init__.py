"""The main job, `penstock train`: a real model on real data with several workers, from launch to checkpoint."""
