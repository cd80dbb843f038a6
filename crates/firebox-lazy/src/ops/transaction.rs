//! Reads of several tensors at once.

use burn_backend::ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData};
use burn_backend::{Backend, ExecutionError};

use crate::Lazy;
use crate::handover::Held;
use crate::session::read;
use crate::streams::{on_stream, poll_on_stream};
use crate::tensor::LazyTensor;

impl<B: Backend> TransactionOps<Self> for Lazy<B> {
    fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send {
        let quantized = transaction.read_qfloats.into_iter().map(LazyTensor::into_inner).collect();
        let transaction = TransactionPrimitive::new(
            transaction.read_floats.into_iter().map(read).collect(),
            quantized,
            transaction.read_ints.into_iter().map(read).collect(),
            transaction.read_bools.into_iter().map(read).collect(),
        );
        poll_on_stream(Held::take(), on_stream(|| B::tr_execute(transaction)))
    }
}
