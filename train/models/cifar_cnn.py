"""A convolution-BatchNorm-pool CNN for 32 x 32 pictures."""

from torch import nn


def model(classes: int, channels: int, width: int = 32, dropout: float = 0.25) -> nn.Module:
    """Three stages, each of which halves the size; the width doubles from one to the next. 99,000 parameters at width 32."""
    layers: list[nn.Module] = []
    inputs = channels
    for outputs in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16 * width, classes))
