"""Layers, as the names of operations tell."""

from __future__ import annotations

from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.layers import OTHER, layers_of


def graph(*names: str) -> TrainingGraph:
    """A chain of operations of these names; from the first that is differentiated on, backward."""
    operations = []
    backward = False
    for i, name in enumerate(names):
        backward |= name.startswith("gradient")
        reads = (i - 1,) if i else ()
        operations.append(Operation(name, "Op", 1.0, reads, (i,), forward=not backward))
    return TrainingGraph(
        tuple(operations), tuple(Buffer(n, 8) for n in names), outputs=(len(names) - 1,)
    )


def test_scopes_below_the_model_are_layers():
    found = layers_of(
        graph(
            "model_1/conv_1/convolution",
            "model_1/conv_1/BiasAdd",
            "model_1/norm_1/batchnorm/mul",
            "model_1/dense_1/MatMul",
            "gradient_tape/model_1/dense_1/MatMul/MatMul",
            "gradient_tape/model_1/norm_1/batchnorm/mul/Mul",
            "gradient_tape/model_1/conv_1/convolution/Conv2DBackpropFilter",
            "adam/Mul",
        )
    )
    assert found == ["conv", "conv", "norm", "dense", "dense", "norm", "conv", "adam"]


def test_gradients_of_tf_gradients():
    found = layers_of(
        graph(
            "a/conv",
            "a/relu",
            "b/conv",
            "b/relu",
            "loss/Mean",
            "gradients/loss/Mean_grad/truediv",
            "gradients/b/relu_grad/ReluGrad",
            "gradients/b/conv_grad/Conv2DBackpropInput",
            "gradients/a/conv_grad/Conv2DBackpropFilter",
        )
    )
    assert found == ["a", "a", "b", "b", "loss", "loss", "b", "b", "a"]


def test_numbers_stay_where_layers_differ_in_them():
    names = ("net/dense/MatMul", "net/dense_1/MatMul", "net/dense_2/MatMul", "net/out/MatMul")
    assert layers_of(graph(*names)) == ["dense", "dense_1", "dense_2", "out"]


def test_what_has_no_scope_goes_with_what_it_reads():
    found = layers_of(graph("Cast", "a/x", "Relu", "b/x", "AddN"))
    assert found == [OTHER, "a", "a", "b", "b"]


def test_depth():
    names = ("net/block1/a/x", "net/block1/b/x", "net/block2/a/x", "net/block2/b/x")
    assert layers_of(graph(*names)) == ["block1", "block1", "block2", "block2"]
    deep = ["block1/a", "block1/b", "block2/a", "block2/b"]
    assert layers_of(graph(*names), depth=2) == deep


def test_without_scopes_all_is_one():
    assert set(layers_of(graph("x", "y", "gradients/y_grad/z"))) == {OTHER}
