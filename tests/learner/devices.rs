//! Devices that a Learner cannot train on: two at once, and one that is not there.
//!
//! The CPU backends have one device each. A backend of several is made of Flex and burn-router: every place is a
//! runner of its own.

use std::collections::BTreeMap;

use burn::backend::flex::FlexDevice;
use burn::backend::{Autodiff, Flex};
use burn::optim::AdamConfig;
use burn::tensor::{DType, Shape, TensorData};
use burn::train::SupervisedTraining;
use burn::train::renderer::CliMetricsRenderer;
use burn_backend::DTypeUsageSet;
use burn_backend::backend::{Device, DeviceId, DeviceOps, ExecutionError};
use burn_ir::{HandleKind, OperationIr, TensorId, TensorIr};
use burn_router::{
    BackendRouter, MultiBackendBridge, RouterTensor, Runner, RunnerChannel, RunnerClient,
};
use burn_std::future::DynFut;
use firebox::{Bytes, Lazy, Learner, TrainError};

use crate::task::{Given, Net, batch, files, random_state};

type B = Autodiff<Lazy<BackendRouter<Places>>>;

/// A device by its number. There are two.
#[derive(Clone, Debug, Default, PartialEq)]
struct Place(u16);

impl Device for Place {
    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id)
    }

    fn to_id(&self) -> DeviceId {
        DeviceId::new(0, self.0)
    }
}

impl DeviceOps for Place {}

#[derive(Clone)]
struct Places;

#[derive(Clone)]
struct AtPlace {
    runner: Runner<Flex>,
    place: Place,
}

impl RunnerChannel for Places {
    type Device = Place;
    type Bridge = SharedMemory;
    type Client = AtPlace;
    type FloatElem = f32;
    type IntElem = i32;
    type BoolElem = u8;

    fn name(device: &Place) -> String {
        format!("place {}", device.0)
    }

    fn init_client(device: &Place) -> AtPlace {
        assert!(device.0 < 2, "there is no place {}", device.0);
        AtPlace { runner: Runner::new(FlexDevice), place: device.clone() }
    }

    fn get_tensor_handle(tensor: &TensorIr, client: &AtPlace) -> HandleKind<Flex> {
        client.runner.get_tensor_handle(tensor)
    }

    fn register_tensor(
        client: &AtPlace,
        handle: HandleKind<Flex>,
        shape: Shape,
        dtype: DType,
    ) -> RouterTensor<AtPlace> {
        client.runner.register_tensor(handle, shape, dtype, client.clone())
    }
}

impl RunnerClient for AtPlace {
    type Device = Place;

    fn register_op(&self, operation: OperationIr) {
        self.runner.register_op(operation);
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        self.runner.read_tensor_async(tensor)
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        self.runner.sync()
    }

    fn create_empty_handle(&self) -> TensorId {
        self.runner.create_empty_handle()
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        let tensor = self.runner.register_tensor_data_desc(data);
        RouterTensor::new(tensor.id, tensor.shape, tensor.dtype, self.clone())
    }

    fn device(&self) -> Place {
        self.place.clone()
    }

    fn seed(&self, seed: u64) {
        self.runner.seed(seed);
    }

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        self.runner.dtype_usage(dtype)
    }
}

/// All places are in the same memory.
struct SharedMemory;

impl MultiBackendBridge for SharedMemory {
    type TensorHandle = HandleKind<Flex>;
    type Device = Place;

    fn change_backend_float(tensor: HandleKind<Flex>, _: Shape, _: &Place) -> HandleKind<Flex> {
        tensor
    }

    fn change_backend_int(tensor: HandleKind<Flex>, _: Shape, _: &Place) -> HandleKind<Flex> {
        tensor
    }

    fn change_backend_bool(tensor: HandleKind<Flex>, _: Shape, _: &Place) -> HandleKind<Flex> {
        tensor
    }
}

/// Trains a model for an epoch; gives the cause if it fails, and whether there is a state to go on from.
fn train(model: Net<B>) -> Result<(), (TrainError, bool)> {
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(
        folder.path(),
        Given::loader(vec![batch::<B>(4)]),
        Given::loader(vec![batch(4)]),
    )
    .with_application_logger(None)
    .renderer(CliMetricsRenderer::new())
    .num_epochs(1);
    let result = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-2)
        .fit(training);
    assert_eq!(files(folder.path()), BTreeMap::new(), "nothing was written");
    result.map(drop).map_err(|error| {
        let (cause, state) = error.into_parts();
        (cause, state.is_some())
    })
}

#[test]
fn a_model_on_two_devices_is_refused() {
    let _lock = random_state();
    let (cause, begun) = train(Net::across(&Place(0), &Place(1))).expect_err("one at a time");
    assert!(matches!(cause, TrainError::SeveralDevices(2)), "{cause}");
    assert!(!begun, "training had not begun");
    train(Net::new(&Place(0))).expect("either of them is fine");
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let _lock = random_state();
    // burn makes parameters when they are first asked for: so late does the backend look for the device.
    let model = Net::<B>::new(&Place(7));
    let (error, _) = train(model).expect_err("there are two");
    let TrainError::NotReady { message } = &error else { panic!("{error}") };
    assert_eq!(message, "there is no place 7");
    train(Net::new(&Place(0))).expect("nothing else was broken");
}
