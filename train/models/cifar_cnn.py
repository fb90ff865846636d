"""A convolution-BatchNorm-pool CNN for 32 x 32 pictures."""

from torch import nn


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def model(classes: int, channels: int, width: int = 32, dropout: float = 0.25) -> nn.Module:
    """Three stages of two convolutions, each halving the size and doubling the width."""
    layers: list[nn.Module] = []
    inputs = channels
    for outputs in (width, 2 * width, 4 * width):
        layers += [*_block(inputs, outputs), *_block(outputs, outputs), nn.MaxPool2d(2)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16 * width, classes))
