//! What the tensors of a model are, without their values: paths, shapes, types, and which of them
//! are trained.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, DType, Int, Shape, Tensor};
use firebox_trace::Bytes;

/// A parameter or another tensor of a model.
#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) is_trained: bool,
}

impl Parameter {
    pub(crate) fn bytes(&self) -> Bytes {
        self.bytes_in(self.dtype)
    }

    /// Its bytes in another type.
    pub(crate) fn bytes_in(&self, dtype: DType) -> Bytes {
        Bytes::of_elements(&self.shape, dtype)
    }

    /// Whether it has a gradient.
    pub(crate) fn has_gradient<B: AutodiffBackend>(&self, grads: &GradientsParams) -> bool {
        // The number of dimensions is that of the gradient itself.
        grads.get::<B::InnerBackend, 1>(self.id).is_some()
    }
}

/// The tensors of a model, in the order of its visit.
pub(crate) fn parameters<B: Backend, M: Module<B>>(model: &M) -> Vec<Parameter> {
    #[derive(Default)]
    struct Found {
        path: Vec<String>,
        found: Vec<Parameter>,
    }

    impl Found {
        fn add(&mut self, id: ParamId, shape: Shape, dtype: DType, is_trained: bool) {
            let path = self.path.join(".");
            self.found.push(Parameter { path, id, shape, dtype, is_trained });
        }
    }

    impl<B: Backend> ModuleVisitor<B> for Found {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let tensor = param.val();
            self.add(param.id, tensor.shape(), tensor.dtype(), param.is_require_grad());
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
            let tensor = param.val();
            self.add(param.id, tensor.shape(), tensor.dtype(), false);
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
            let tensor = param.val();
            self.add(param.id, tensor.shape(), tensor.dtype(), false);
        }

        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
    }

    let mut found = Found::default();
    model.visit(&mut found);
    found.found
}

/// The paths and shapes of a model's parameters and running statistics.
pub(crate) fn shapes_of<B: Backend, M: Module<B>>(model: &M) -> Vec<(String, Vec<usize>)> {
    let of = |parameter: Parameter| (parameter.path, parameter.shape.to_vec());
    parameters(model).into_iter().map(of).collect()
}

/// The bytes of a model's parameters and running statistics.
pub(crate) fn parameter_bytes<B: Backend, M: Module<B>>(model: &M) -> Bytes {
    parameters(model).iter().map(Parameter::bytes).sum()
}

/// The paths and bytes of the parameters that are trained.
pub(crate) fn trained_parameters<B: Backend, M: Module<B>>(model: &M) -> Vec<(String, Bytes)> {
    let trained = parameters(model).into_iter().filter(|parameter| parameter.is_trained);
    let of = |parameter: Parameter| {
        let bytes = parameter.bytes();
        (parameter.path, bytes)
    };
    trained.map(of).collect()
}

/// Whether a model has untrained tensors. Its running statistics, if any, are among these.
pub(crate) fn has_untrained<B: Backend, M: Module<B>>(model: &M) -> bool {
    parameters(model).iter().any(|parameter| !parameter.is_trained)
}
