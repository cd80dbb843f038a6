//! An operation that burn does not have: the snake activation, as two custom kernels.
//!
//! The activation is `x + sin²(αx) / α` with a learned `α` per feature (Ziyin, Hartwig and Ueda
//! 2020, "Neural Networks Fail to Learn Periodic Functions and How to Fix It").
//!
//! The kernels run on the host, on Flex. For a GPU, write them in CubeCL's language; nothing else
//! changes.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{TensorMetadata, TensorPrimitive};
use firebox::{Bytes, CustomOp, Lazy};

/// The kernels, without automatic differentiation.
pub trait SnakeKernels: Backend {
    /// Applies the activation: `x` is `[items, features]`, `alpha` is `[features]`, the result is
    /// `[items, features]`.
    fn snake(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Computes the gradients of `x` and `alpha` from the gradient of the result.
    fn snake_backward(
        x: FloatTensor<Self>,
        alpha: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

/// Backends that can run models with the activation.
pub trait Snake: Backend {
    /// Same as [`SnakeKernels::snake`], with a backward pass where the backend has one.
    fn activate(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Applies the activation to burn tensors: `x` is `[items, features]`, `alpha` is `[features]`.
pub fn snake<B: Snake>(x: Tensor<B, 2>, alpha: Tensor<B, 1>) -> Tensor<B, 2> {
    let (x, alpha) = (x.into_primitive().tensor(), alpha.into_primitive().tensor());
    Tensor::from_primitive(TensorPrimitive::Float(B::activate(x, alpha)))
}

impl SnakeKernels for Flex {
    fn snake(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        let form = x.shape();
        let (x, alpha) = (values::<2>(x), values::<1>(alpha));
        let activated = x.iter().enumerate().map(|(at, x)| {
            let alpha = alpha[at % alpha.len()];
            x + (alpha * x).sin().powi(2) / alpha
        });
        tensor::<2>(activated.collect(), form)
    }

    fn snake_backward(
        x: FloatTensor<Self>,
        alpha: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let forms = (x.shape(), alpha.shape());
        let (x, alpha, mut grad) = (values::<2>(x), values::<1>(alpha), values::<2>(grad));
        let mut grad_alpha = vec![0.0; alpha.len()];
        for (at, (x, grad)) in x.iter().zip(&mut grad).enumerate() {
            let feature = at % alpha.len();
            let a = alpha[feature];
            let (sine, twice) = ((a * x).sin(), (2.0 * a * x).sin());
            grad_alpha[feature] += *grad * (x * twice - sine * sine / a) / a;
            *grad *= 1.0 + twice;
        }
        (tensor::<2>(grad, forms.0), tensor::<1>(grad_alpha, forms.1))
    }
}

fn values<const D: usize>(tensor: FloatTensor<Flex>) -> Vec<f32> {
    let tensor = Tensor::<Flex, D>::from_primitive(TensorPrimitive::Float(tensor));
    tensor.into_data().into_vec().expect("the tensor holds f32")
}

fn tensor<const D: usize>(values: Vec<f32>, shape: Shape) -> FloatTensor<Flex> {
    let data = TensorData::new(values, shape);
    Tensor::<Flex, D>::from_data(data, &Default::default()).into_primitive().tensor()
}

/// Tells firebox the shapes of the results and the extra memory a kernel allocates.
impl<B: SnakeKernels> SnakeKernels for Lazy<B> {
    fn snake(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        let form = (x.shape(), x.dtype());
        // If a tensor has other owners, Flex copies its values twice to hand them out.
        let workspace = bytes(&x) * 2 + bytes(&alpha) * 2;
        CustomOp::new("snake")
            .workspace(workspace)
            .call((x, alpha), form, |(x, alpha)| B::snake(x, alpha))
    }

    fn snake_backward(
        x: FloatTensor<Self>,
        alpha: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let forms = ((x.shape(), x.dtype()), (alpha.shape(), alpha.dtype()));
        let workspace = bytes(&x) * 2 + bytes(&alpha) * 2 + bytes(&grad) * 2;
        let run = |(x, alpha, grad)| B::snake_backward(x, alpha, grad);
        CustomOp::new("snake_backward").workspace(workspace).call((x, alpha, grad), forms, run)
    }
}

fn bytes(tensor: &impl TensorMetadata) -> Bytes {
    Bytes::new((tensor.shape().num_elements() * tensor.dtype().size()) as u64)
}

impl<B: SnakeKernels> Snake for Lazy<B> {
    fn activate(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::snake(x, alpha)
    }
}

impl Snake for Flex {
    fn activate(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::snake(x, alpha)
    }
}

/// The backward pass, written as for any burn operation.
impl<B: SnakeKernels, C: CheckpointStrategy> Snake for Autodiff<B, C> {
    fn activate(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct SnakeBackward;

        impl<B: SnakeKernels> Backward<B, 2> for SnakeBackward {
            type State = (FloatTensor<B>, FloatTensor<B>);

            fn backward(
                self,
                ops: Ops<Self::State, 2>,
                grads: &mut Gradients,
                _checkpointer: &mut Checkpointer,
            ) {
                let [x_node, alpha_node] = ops.parents;
                let (x, alpha) = ops.state;
                let grad = grads.consume::<B>(&ops.node);
                let (x_grad, alpha_grad) = B::snake_backward(x, alpha, grad);
                if let Some(node) = x_node {
                    grads.register::<B>(node.id, x_grad);
                }
                if let Some(node) = alpha_node {
                    grads.register::<B>(node.id, alpha_grad);
                }
            }
        }

        let nodes = [x.node.clone(), alpha.node.clone()];
        match SnakeBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => {
                let state = (x.primitive.clone(), alpha.primitive.clone());
                prepared.finish(state, B::snake(x.primitive, alpha.primitive))
            }
            OpsKind::UnTracked(prepared) => prepared.finish(B::snake(x.primitive, alpha.primitive)),
        }
    }
}
