// A trainer in Go: a batch, its samples, and a push of weights by a folder. README.md has the commands.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	pb "example.com/trainer/gen/paceline/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// step submits a batch, prints its samples, and acknowledges them.
func step(ctx context.Context, rollouts pb.RolloutServiceClient, run string, number, version uint64) error {
	batch := fmt.Sprintf("step-%d", number)
	groups := []*pb.Group{
		{PromptId: "p0", PromptTokenIds: []uint32{3, 4, 5}, Samples: 2},
		{PromptId: "p1", PromptTokenIds: []uint32{3, 4, 6}, Samples: 2},
	}
	sampling := &pb.SamplingParams{Temperature: proto.Float32(1), MaxTokens: proto.Int32(16)}
	submitted := &pb.SubmitRolloutsRequest{RunId: run, BatchId: batch, Step: number, PolicyVersion: version,
		Groups: groups, Sampling: sampling, RunSeed: 7}
	if _, err := rollouts.SubmitRollouts(ctx, submitted); err != nil {
		return err
	}
	var cursor uint64
	for read, total := uint32(0), uint32(1); read < total; {
		// After a lost connection the stream continues after the last sample that was read.
		stream, err := rollouts.StreamRollouts(ctx, &pb.StreamRolloutsRequest{RunId: run, BatchId: batch, Cursor: cursor})
		for err == nil && read < total {
			var event *pb.StreamRolloutsResponse
			if event, err = stream.Recv(); err != nil {
				break
			}
			cursor, total = event.GetCursor(), event.GetTotal()
			if sample := event.GetSample(); sample != nil {
				read++
				fmt.Println(sample.GetPromptId(), sample.GetSlot(), sample.GetStatus(), sample.GetTokens().GetTokenIds())
			}
		}
		if err != nil && status.Code(err) != codes.Unavailable {
			return err
		}
		if err != nil {
			time.Sleep(time.Second)
		}
	}
	_, err := rollouts.AckRollouts(ctx, &pb.AckRolloutsRequest{RunId: run, BatchId: batch, Cursor: cursor})
	return err
}

// push publishes a folder of safetensors files as the next version.
func push(ctx context.Context, weights pb.WeightServiceClient, run, folder string, version uint64) error {
	started, err := weights.StartUpdate(ctx, &pb.StartUpdateRequest{RunId: run, PolicyVersion: version,
		Target: pb.WeightTarget_WEIGHT_TARGET_POLICY, Transport: pb.WeightTransport_WEIGHT_TRANSPORT_DISK})
	if err != nil {
		return err
	}
	stream, err := weights.UpdateWeights(ctx)
	if err != nil {
		return err
	}
	source := &pb.UpdateWeightsRequest_Disk{Disk: &pb.DiskWeights{Path: folder}}
	// An error of Send is told by CloseAndRecv.
	_ = stream.Send(&pb.UpdateWeightsRequest{UpdateId: started.GetUpdateId(), Source: source})
	if _, err := stream.CloseAndRecv(); err != nil {
		return err
	}
	finished, err := weights.FinishUpdate(ctx, &pb.FinishUpdateRequest{UpdateId: started.GetUpdateId()})
	if err == nil {
		fmt.Println("published", finished.GetPolicyVersion())
	}
	return err
}

func main() {
	address, run := os.Args[1], os.Args[2]
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(16<<20)))
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	if token := os.Getenv("PACELINE_TOKEN"); token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	weights := pb.NewWeightServiceClient(connection)
	versions, err := weights.GetVersions(ctx, &pb.GetVersionsRequest{})
	if err == nil {
		err = step(ctx, pb.NewRolloutServiceClient(connection), run, 0, versions.GetPolicyVersion())
	}
	if err == nil && len(os.Args) > 3 {
		var folder string
		if folder, err = filepath.Abs(os.Args[3]); err == nil {
			err = push(ctx, weights, run, folder, versions.GetPolicyVersion()+1)
		}
	}
	if err != nil {
		log.Fatal(err)
	}
}
