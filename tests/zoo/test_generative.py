"""The zoo's generative models."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, ops

from zoo.harness import Family, Trial, Way, descend, everything_of, fit, loop, normal, weight

zoo = Family("generative")
BATCH = 2048
DATA = normal(2 * BATCH, 32)


def dense(*sizes: int, activation: str = "tanh") -> keras.Sequential:
    hidden = [layers.Dense(n, activation=activation) for n in sizes[1:-1]]
    return keras.Sequential([keras.Input((sizes[0],)), *hidden, layers.Dense(sizes[-1])])


class Autoencoder(keras.Model):
    """A variational autoencoder with a training step of its own."""

    def __init__(self):
        super().__init__()
        self.encoder = dense(32, 64, 64, 64, 16)
        self.decoder = dense(8, 64, 64, 64, 32)
        self.seeds = keras.random.SeedGenerator(7)
        self.total = keras.metrics.Mean(name="total")

    @property
    def metrics(self):
        return [self.total]

    def call(self, x):
        mean, spread = ops.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        self.add_loss(1e-3 * ops.mean(ops.square(mean) + ops.exp(spread) - spread))
        return self.decoder(mean + ops.exp(0.5 * spread) * noise)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data, training=True) - data) ** 2) + sum(self.losses)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        self.total.update_state(loss)
        return {"total": self.total.result()}


@zoo.row("keras.apply", "stateless sampling from a seed generator, train_step of its own", 0.7)
def vae(way: Way) -> Trial:
    model = way.keras(Autoencoder())
    model.compile(keras.optimizers.Adam(0.01))
    return fit(model, DATA, batch=BATCH)


@zoo.row("gradients", "stateful sampling, which is never repeated", 0.8)
def vae_with_stateful_sampling(way: Way) -> Trial:
    encoder, decoder = dense(32, 64, 64, 64, 16), dense(8, 64, 64, 64, 32)
    generator = tf.random.Generator.from_seed(5)
    variables = [v.value for v in (*encoder.trainable_variables, *decoder.trainable_variables)]

    @tf.function
    def step(x):
        mean, spread = tf.split(encoder(x), 2, axis=-1)
        noise = tf.random.normal(tf.shape(mean), seed=3) + generator.normal(tf.shape(mean))
        y = decoder(mean + tf.exp(0.5 * spread) * noise)
        y *= tf.random.uniform(tf.shape(y), 0.5, 1.5, seed=4)
        loss = tf.reduce_mean((y - x) ** 2) + 1e-3 * tf.reduce_mean(mean**2 - spread)
        grads = way.gradients(loss, variables)
        descend(variables, grads)
        return loss, grads

    return loop(step, [(DATA[:BATCH],)], [*variables, generator.state])


def players() -> tuple[keras.Model, keras.Model]:
    return dense(8, 64, 64, 64, 32), dense(32, 64, 64, 64, 1)


@zoo.row("gradients", "two calls over one forward pass, one for each player", 0.75, plans=2)
def gan(way: Way) -> Trial:
    generator, critic = players()
    variables = [[v.value for v in m.trainable_variables] for m in (generator, critic)]

    @tf.function
    def step(real, noise):
        on_fake, on_real = critic(generator(noise)), critic(real)
        cheat = tf.reduce_mean(tf.nn.softplus(-on_fake))
        judge = tf.reduce_mean(tf.nn.softplus(on_fake) + tf.nn.softplus(-on_real))
        grads = [
            way.gradients(loss, vs) for loss, vs in zip((cheat, judge), variables, strict=True)
        ]
        for vs, gs in zip(variables, grads, strict=True):
            descend(vs, gs)
        return cheat, judge, grads

    return loop(step, [(DATA[:BATCH], normal(BATCH, 8))], variables)


@zoo.row("whole_step", "two players and two optimizers planned together", 0.75)
def gan_as_one_step(way: Way) -> Trial:
    models = players()
    generator, critic = models
    optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)]
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(real, noise):
        with way.whole_step() as whole:
            with tf.GradientTape(persistent=True) as tape:
                on_fake, on_real = critic(generator(noise)), critic(real)
                cheat = tf.reduce_mean(tf.nn.softplus(-on_fake))
                judge = tf.reduce_mean(tf.nn.softplus(on_fake) + tf.nn.softplus(-on_real))
            for loss, model, optimizer in zip((cheat, judge), models, optimizers, strict=True):
                variables = model.trainable_variables
                grads = tape.gradient(loss, variables)
                optimizer.apply_gradients(zip(grads, variables, strict=True))
            whole.keep((cheat, judge))
        return cheat, judge

    def state():
        return [everything_of(m, o) for m, o in zip(models, optimizers, strict=True)]

    return loop(step, [(DATA[:BATCH], normal(BATCH, 8))], state)


@zoo.row("GradientTape", "gradient penalty: second order", 0.7)
def gradient_penalty(way: Way) -> Trial:
    critic = dense(32, 64, 64, 64, 1)
    variables = critic.trainable_variables

    @tf.function
    def step(real, fake, mix):
        with way.tape() as tape:
            between = mix * real + (1.0 - mix) * fake
            with tf.GradientTape() as inner:
                inner.watch(between)
                judged = critic(between)
            slope = tf.norm(inner.gradient(judged, between), axis=1)
            loss = tf.reduce_mean(critic(fake) - critic(real))
            loss += 10.0 * tf.reduce_mean((slope - 1.0) ** 2)
        grads = tape.gradient(loss, variables)
        descend(variables, grads)
        return loss, grads

    batches = [(DATA[:BATCH], DATA[BATCH:], abs(normal(BATCH, 1)) % 1)]
    return loop(step, batches, lambda: everything_of(critic))


@zoo.row("gradients", "noise at a random level added by tf.random.stateless_*", 0.7)
def diffusion(way: Way) -> Trial:
    ws = [weight(33, 64), *(weight(64, 64, seed=i) for i in range(5)), weight(64, 32)]
    seed = tf.Variable([1, 2], trainable=False)

    @tf.function
    def step(x):
        now = seed.read_value()
        seed.assign_add([1, 0])
        level = tf.random.stateless_uniform((BATCH, 1), now)
        noise = tf.random.stateless_normal((BATCH, 32), now + 7)
        h = tf.concat([tf.sqrt(1.0 - level) * x + tf.sqrt(level) * noise, level], axis=1)
        for w in ws[:-1]:
            h = tf.nn.silu(h @ w)
        loss = tf.reduce_mean((h @ ws[-1] - noise) ** 2)
        grads = way.gradients(loss, ws)
        descend(ws, grads)
        return loss, grads

    return loop(step, [(DATA[:BATCH],)], [*ws, seed])


test_generative = zoo.test()
