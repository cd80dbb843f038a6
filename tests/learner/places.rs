//! A backend with several devices, made of Flex and burn-router. Each place is a runner of its own,
//! and can be told to fail.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::backend::Flex;
use burn::backend::flex::FlexDevice;
use burn::tensor::{DType, Shape, TensorData};
use burn_backend::DTypeUsageSet;
use burn_backend::backend::{Device, DeviceId, DeviceOps, ExecutionError};
use burn_ir::{HandleKind, OperationIr, TensorId, TensorIr};
use burn_router::{MultiBackendBridge, RouterTensor, Runner, RunnerChannel, RunnerClient};
use burn_std::future::DynFut;

/// Number of backend calls begun in this process.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Number of the call that panics.
static FAULT: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Runs `work` with a panic in the call number `fault`, counted from 1. Returns the result and the
/// number of calls.
pub fn with_fault<R>(fault: usize, work: impl FnOnce() -> R) -> (R, usize) {
    CALLS.store(0, SeqCst);
    FAULT.store(fault, SeqCst);
    let result = work();
    FAULT.store(usize::MAX, SeqCst);
    (result, CALLS.load(SeqCst))
}

fn begin(call: &str) {
    let number = CALLS.fetch_add(1, SeqCst) + 1;
    assert!(number != FAULT.load(SeqCst), "fault {number} in {call}");
}

/// A device by number. There are two.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Place(pub u16);

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
pub struct Places;

#[derive(Clone)]
pub struct AtPlace {
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
        // Excluded because destructors release tensors.
        if !matches!(operation, OperationIr::Drop(_)) {
            begin("an operation");
        }
        self.runner.register_op(operation);
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        begin("a read");
        self.runner.read_tensor_async(tensor)
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        self.runner.sync()
    }

    fn create_empty_handle(&self) -> TensorId {
        self.runner.create_empty_handle()
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        begin("an upload");
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

/// All places share the same memory.
pub struct SharedMemory;

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
