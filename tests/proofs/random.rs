//! Random programs on a model and its batch.

use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::activation::softmax;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{TrainOutput, TrainStep};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::losses::{Batch, LONG, Net, WIDE};

/// A program that follows from its number.
#[derive(Module, Debug)]
pub struct Program<B: Backend> {
    pub net: Net<B>,
    #[module(skip)]
    pub seed: u64,
}

impl<B: AutodiffBackend> TrainStep for Program<B> {
    type Input = Batch<B>;
    type Output = ();

    fn step(&self, batch: Batch<B>) -> TrainOutput<()> {
        let grads = self.loss(&batch).backward();
        TrainOutput { grads: GradientsParams::from_grads(grads, self), item: () }
    }
}

impl<B: Backend> Program<B> {
    fn loss(&self, batch: &Batch<B>) -> Tensor<B, 1> {
        let mut random = StdRng::seed_from_u64(self.seed);
        let mut below = |most: usize| random.random_range(0..most);
        let n = batch.x.dims()[0];
        let net = &self.net;
        let hidden = net.first.forward(batch.x.clone()).tanh();
        // Of the batch, of parameters, and constants.
        let mut all: Vec<Tensor<B, 3>> = vec![
            batch.y.clone().unsqueeze_dim(2),
            batch.x.clone().reshape([n, 2, 3]),
            batch.tokens.clone().greater_elem(0).float().unsqueeze_dim(2),
            net.embedding.forward(batch.tokens.clone()).slice([0..n, 0..LONG, 0..4]),
            hidden.clone().reshape([n, 2, WIDE / 2]),
            net.out.forward(net.second.forward(hidden)).unsqueeze_dim(1),
            net.second.weight.val().slice([0..4, 0..4]).unsqueeze(),
            net.second.weight.val().slice([0..2, 0..4]).unsqueeze(),
            batch.y.clone().slice([0..n, 0..1]).ones_like().unsqueeze_dim(2),
        ];
        for _ in 0..5 + below(12) {
            let late = below(2) == 0;
            let at = if late { all.len() - 1 - below(3) } else { below(all.len()) };
            let (a, b) = (all[at].clone(), all[below(all.len())].clone());
            let (kind, dim, to) = (below(40), below(3), below(3));
            let made = operation((kind, dim, to), n, a, b);
            all.extend(made.filter(|made| made.shape().num_elements() < 40_000));
        }
        let mut loss = batch.y.clone().slice([0..1, 0..1]).zeros_like().reshape([1]);
        for _ in 0..1 + below(2) {
            let one = all[all.len() - 1 - below(3)].clone();
            let other = all[below(all.len())].clone();
            loss = loss
                + match below(7) {
                    0 => one.sum(),
                    1 => one.sum() / n as f32,
                    2 => one.sum() / (other.square().sum() + 1.0),
                    3 => one.sum() / (other.detach().square().sum() + 1.0),
                    _ => one.mean(),
                };
        }
        loss
    }
}

fn operation<B: Backend>(
    (kind, dim, to): (usize, usize, usize),
    n: usize,
    a: Tensor<B, 3>,
    b: Tensor<B, 3>,
) -> Option<Tensor<B, 3>> {
    let ([p, q, s], other) = (a.dims(), b.dims());
    let fits = [p, q, s].iter().zip(other).all(|(a, b)| *a == b || *a == 1 || b == 1);
    let alike = (0..3).all(|at| at == dim || a.dims()[at] == other[at]);
    Some(match kind {
        0 => a.tanh(),
        1 => a.clamp(-2.0, 2.0).exp(),
        2 => a.square(),
        3..=5 if fits => a + b,
        6..=9 if fits => a * b,
        10 if fits => a / (b.square() + 1.0),
        11 if fits && a.dims() == (a.clone() + b.clone()).dims() => {
            a.clone().mask_fill(a.greater(b), 0.0)
        }
        12 | 13 => a.sum_dim(dim),
        14 | 15 => a.mean_dim(dim),
        16 | 17 => a.swap_dims(dim, to),
        18 => a.reshape([1, p * q, s]),
        19 => a.reshape([p * q, 1, s]),
        20 => a.reshape([p, 1, q * s]),
        21 if p % n == 0 && p > n => a.reshape([p / n, n, q * s]),
        21 if p % n == 0 => a.reshape([n, p / n * q, s]),
        22 if q % n == 0 => a.reshape([p * (q / n), n, s]),
        23 if alike => Tensor::cat(vec![a, b], dim),
        24 if p == other[0] && s == other[1] => a.matmul(b),
        25 if p == other[0] && s == other[2] => a.matmul(b.swap_dims(1, 2)),
        26 => softmax(a, dim),
        27 => a.repeat_dim(dim, 2),
        28 => a.flip([dim as isize]),
        29 => a.cumsum(dim),
        30 => a.max_dim(dim),
        31 => a.detach(),
        32 => {
            let largest = a.clone().argmax(dim);
            a.gather(dim, largest)
        }
        33 if a.dims()[dim].is_multiple_of(2) => a.chunk(2, dim).remove(0),
        34 => {
            let order = a.clone().detach().argsort(dim);
            a.gather(dim, order)
        }
        35 if fits && a.dims() == (a.clone() + b.clone()).dims() => {
            a.mask_where(b.clone().greater_elem(0.1), b * 0.5)
        }
        36 => a * n as f32,
        37 => a / n as f32,
        38 => {
            let last = a.dims()[dim] - 1;
            a.narrow(dim, last, 1)
        }
        39 if p % n == 0 => {
            let ranges = [0..p, 0..1, 0..s];
            let value = a.clone().slice(ranges.clone()) * 2.0;
            a.slice_assign(ranges, value)
        }
        _ => return None,
    })
}
