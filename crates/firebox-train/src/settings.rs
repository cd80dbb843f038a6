//! What the user asked for, resolved on the device that will train.

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};
use firebox_lazy::LazyBackend;
use firebox_plan::{Budget, Sizing, host_memory};
use firebox_trace::{Bytes, Heap, MemoryModel};

use crate::error::TrainError;
use crate::gradients::Reduction;
use crate::planner::{Planned, Planner};
use crate::report::PlanReport;

/// The options of a Learner.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    pub(crate) budget: Budget,
    pub(crate) sizing: Sizing,
    pub(crate) reduction: Reduction,
    pub(crate) quiet: bool,
}

impl Settings {
    /// The planner for a model on its device.
    pub(crate) fn planner<B: LazyBackend, M: Module<B>>(
        &self,
        model: &M,
    ) -> Result<Planner, TrainError> {
        let backend = backend_name::<B, M>(model);
        let budget = self.resolve::<B, M>(&backend, model)?;
        Ok(Planner::new(memory_model(&backend), budget, self.sizing))
    }

    /// The budget in bytes. Free memory does not count what the model holds already, a plan does.
    fn resolve<B: Backend, M: Module<B>>(
        &self,
        backend: &str,
        model: &M,
    ) -> Result<Bytes, TrainError> {
        let memory = match self.budget {
            Budget::Bytes(bytes) => firebox_plan::MemoryInfo::new(bytes, bytes, "the budget"),
            _ if is_on_host(backend) => host_memory()?,
            _ => return Err(TrainError::UnknownMemory { device: backend.to_owned() }),
        };
        let budget = self.budget.resolve(&memory)?;
        Ok(match self.budget {
            Budget::Free { .. } => budget + parameter_bytes::<B, M>(model),
            _ => budget,
        })
    }

    /// Reports a plan, and says it unless told to be quiet.
    pub(crate) fn report<B: LazyBackend, M: Module<B>>(
        &self,
        model: &M,
        planner: &Planner,
        planned: &Planned,
    ) -> PlanReport {
        let device = model.devices()[0].clone();
        let device = format!("{}, {device:?}", backend_name::<B, M>(model));
        let report = PlanReport::new(device, planner.budget, planned);
        if self.quiet {
            log::info!("{report}");
        } else {
            eprintln!("{report}");
        }
        if let Some(warning) = report.warning() {
            log::warn!("{warning}");
            if !self.quiet {
                eprintln!("warning: {warning}");
            }
        }
        report
    }
}

/// The name of the backend that runs a model.
fn backend_name<B: LazyBackend, M: Module<B>>(model: &M) -> String {
    let device = model.devices()[0].clone();
    <B::Base as Backend>::name(&device)
}

fn is_on_host(backend: &str) -> bool {
    matches!(backend, "flex" | "ndarray")
}

/// The model of memory of a backend.
fn memory_model(backend: &str) -> Arc<dyn MemoryModel> {
    match backend {
        "flex" => Arc::new(Heap::flex()),
        "ndarray" => Arc::new(Heap::simple()),
        _ => Arc::new(Heap::simple().on_device()),
    }
}

/// The bytes of a module's parameters and running statistics.
pub(crate) fn parameter_bytes<B: Backend, M: Module<B>>(module: &M) -> Bytes {
    struct Count(u64);

    impl<B: Backend> ModuleVisitor<B> for Count {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let tensor = param.val();
            self.0 += (tensor.shape().num_elements() * tensor.dtype().size()) as u64;
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
            let tensor = param.val();
            self.0 += (tensor.shape().num_elements() * tensor.dtype().size()) as u64;
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
            let tensor = param.val();
            self.0 += (tensor.shape().num_elements() * tensor.dtype().size()) as u64;
        }
    }

    let mut count = Count(0);
    module.visit(&mut count);
    Bytes::new(count.0)
}
