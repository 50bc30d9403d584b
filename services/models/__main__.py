"""Download a model: `python -m services.models --source hf://Qwen/Qwen3-8B --folder /weights/qwen3-8b`."""

from services.models.command import app

if __name__ == "__main__":
    app()
