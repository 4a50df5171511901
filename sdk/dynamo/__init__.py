"""NVIDIA Dynamo's names, and the tool that ports code to Tandem's."""
