//! Describes a call in burn's intermediate representation.
//!
//! burn-router translates every operation of a backend into burn-ir and knows the shapes of the
//! results. Here it is used for nothing else. The channel below executes nothing, and its client
//! writes the operations into the session of the thread.

use std::marker::PhantomData;

use burn_backend::{Backend, DType, DTypeUsageSet, ExecutionError, Shape, TensorData};
use burn_ir::{InitOperationIr, OperationIr, TensorId, TensorIr};
use burn_router::{BackendRouter, MultiBackendBridge, RouterTensor, RunnerChannel, RunnerClient};
use burn_std::future::DynFut;

use crate::record::session;

/// burn-router's backend, used to describe calls of `B`.
pub(crate) type Describer<B> = BackendRouter<Description<B>>;

/// A tensor in a description.
pub(crate) type Described<B> = RouterTensor<DescriptionClient<B>>;

/// The channel of the describing router.
#[derive(Clone)]
pub struct Description<B: Backend>(PhantomData<B>);

/// The client of the describing router. Writes into the session of its thread.
#[derive(Clone, Debug)]
pub struct DescriptionClient<B: Backend> {
    pub(crate) device: B::Device,
}

impl<B: Backend> DescriptionClient<B> {
    pub(crate) fn new(device: B::Device) -> Self {
        Self { device }
    }
}

impl<B: Backend> RunnerClient for DescriptionClient<B> {
    type Device = B::Device;

    fn register_op(&self, op: OperationIr) {
        // Without a session, only what is left of a panicked description arrives, and is dropped.
        session::with::<B, _>(|session| session.describe(op));
    }

    fn read_tensor_async(&self, _tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        unreachable!(
            "a description has no values: operations that read are described by their shapes"
        )
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        Ok(())
    }

    fn create_empty_handle(&self) -> TensorId {
        let id = session::with::<B, _>(|session| session.next_local());
        id.expect("calls are described inside a recording")
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        let id = session::with::<B, _>(|session| {
            let id = session.next_local();
            let out = TensorIr::uninit(id, data.shape.clone(), data.dtype);
            session.describe(OperationIr::Init(InitOperationIr { out }));
            session.keep_described(id, &data);
            id
        });
        let id = id.expect("calls are described inside a recording");
        RouterTensor::new(id, data.shape, data.dtype, self.clone())
    }

    fn device(&self) -> Self::Device {
        self.device.clone()
    }

    fn seed(&self, _seed: u64) {}

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(&self.device, dtype)
    }
}

impl<B: Backend> RunnerChannel for Description<B> {
    type Device = B::Device;
    type Bridge = NoBridge<B>;
    type Client = DescriptionClient<B>;
    type FloatElem = B::FloatElem;
    type IntElem = B::IntElem;
    type BoolElem = B::BoolElem;

    fn name(device: &Self::Device) -> String {
        B::name(device)
    }

    fn init_client(device: &Self::Device) -> Self::Client {
        DescriptionClient::new(device.clone())
    }

    fn get_tensor_handle(_tensor: &TensorIr, _client: &Self::Client) {
        unreachable!("moves between devices are described by their shapes")
    }

    fn register_tensor(
        _client: &Self::Client,
        _handle: (),
        _shape: Shape,
        _dtype: DType,
    ) -> RouterTensor<Self::Client> {
        unreachable!("moves between devices are described by their shapes")
    }
}

/// The bridge that the router requires. A description never crosses it.
pub struct NoBridge<B: Backend>(PhantomData<B>);

impl<B: Backend> MultiBackendBridge for NoBridge<B> {
    type TensorHandle = ();
    type Device = B::Device;

    fn change_backend_float(_tensor: (), _shape: Shape, _device: &Self::Device) {}
    fn change_backend_int(_tensor: (), _shape: Shape, _device: &Self::Device) {}
    fn change_backend_bool(_tensor: (), _shape: Shape, _device: &Self::Device) {}
}
