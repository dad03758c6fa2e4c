"""``python -m loss_plugins``, the form that ``accelerate launch -m`` and ``torchrun -m`` take."""

from .cli.main import app

if __name__ == "__main__":
    app(prog_name="loss-plugins")
