//! Loads what an earlier run of a loop has saved, into the place where state is parked.

use burn::module::AutodiffModule;

use crate::components::TrainingBackend;
use crate::error::TrainError;
use crate::steps::StepPlanner;

impl<B, M, S> StepPlanner<B, M, S>
where
    B: TrainingBackend,
    M: AutodiffModule<B>,
{
    /// Runs `load`, which reads optimizers' state from files. Where state is
    /// [parked](crate::LearnerBuilder::park_optimizer), what `load` would upload is parked instead,
    /// as if updates had left it. Call it before the first step. Load parameters of models outside
    /// of it.
    ///
    /// ```no_run
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::{AdamConfig, Optimizer};
    /// # use firebox_lazy::Lazy;
    /// # use firebox_train::{Learner, Park};
    /// use burn::record::{BinFileRecorder, FullPrecisionSettings, Recorder};
    ///
    /// # type B = Autodiff<Lazy<Flex>>;
    /// # let device = Default::default();
    /// # let model: Linear<B> = LinearConfig::new(2, 1).init(&device);
    /// # let mut optim = AdamConfig::new().init::<B, Linear<B>>();
    /// # let builder = Learner::builder().auto_batch().park_optimizer(Park::Disk("/tmp".into()));
    /// let mut steps = builder.step_planner(&model)?;
    /// let files = BinFileRecorder::<FullPrecisionSettings>::new();
    /// let record = steps.load(|| files.load("optim".into(), &device))??;
    /// optim = optim.load_record(record);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If state could not be parked. It is in host memory then.
    pub fn load<R>(&mut self, load: impl FnOnce() -> R) -> Result<R, TrainError> {
        let Some((parking, there)) = &mut self.parking else { return Ok(load()) };
        let (loaded, parked) = parking.park_loaded(load)?;
        *there += parked;
        Ok(loaded)
    }
}
